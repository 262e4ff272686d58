"""The draft model proposer: a smaller language model. Owns its exports."""

from paceline.proposers.draft_model.build import build
from paceline.proposers.draft_model.proposer import DraftModelProposer

__all__ = ["DraftModelProposer", "build"]
