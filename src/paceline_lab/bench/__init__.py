"""Load on a server, and the engine's throughput."""
