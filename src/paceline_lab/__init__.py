"""The laboratory: train drafts, record and replay traces, tune, verify, measure quality and load.

It is built on :mod:`paceline`, which does not know it: its commands join the command line through
entry points.
"""
