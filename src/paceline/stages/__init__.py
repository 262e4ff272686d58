"""A model whose layers lie in several processes, perhaps on several hosts, one after another.

The engine's own process has the first layers, and a *stage* each of the following parts
(:mod:`~paceline.stages.worker`). :class:`~paceline.stages.backend.StagedOps` makes them
one backend: to the engine it is a forward that takes longer, with the bits of one process, for the
residual stream is handed on as it is.
"""
