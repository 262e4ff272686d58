"""Checkpoints that are quantised already, by their methods."""
