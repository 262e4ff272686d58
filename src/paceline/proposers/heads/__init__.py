"""Heads: small decoders that draft from the target's hidden states. Owns its exports."""

from paceline.proposers.heads.build import build, build_head, open_head
from paceline.proposers.heads.dflash import DFlashProposer
from paceline.proposers.heads.dspark import DSparkProposer
from paceline.proposers.heads.peagle import PEagleProposer
from paceline.proposers.heads.proposer import HeadProposer

__all__ = [
    "DFlashProposer",
    "DSparkProposer",
    "HeadProposer",
    "PEagleProposer",
    "build",
    "build_head",
    "open_head",
]
