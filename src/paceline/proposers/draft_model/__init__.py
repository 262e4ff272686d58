"""The draft model proposer: a smaller language model of the same vocabulary. Owns its exports."""

from paceline.proposers.draft_model.proposer import DraftModelProposer

__all__ = ["DraftModelProposer"]
