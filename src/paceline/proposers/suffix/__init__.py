"""Drafts from suffix automata over a request and over finished ones."""

from paceline.proposers.suffix.proposer import SuffixProposer

__all__ = ["SuffixProposer"]
