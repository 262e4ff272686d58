"""A trained n-gram model that also learns from the request at hand."""

from paceline.proposers.ngram_model.proposer import NgramModelProposer

__all__ = ["NgramModelProposer"]
