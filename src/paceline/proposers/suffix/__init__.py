"""Drafts from suffix automata over a request and over finished ones."""

from paceline.proposers.suffix.proposer import SuffixProposer, build

__all__ = ["SuffixProposer", "build"]
