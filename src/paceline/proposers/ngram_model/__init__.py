"""A trained n-gram model that also learns from the request at hand."""

from paceline.proposers.ngram_model.proposer import NgramModelProposer, build

__all__ = ["NgramModelProposer", "build"]
