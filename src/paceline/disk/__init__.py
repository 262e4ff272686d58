"""Weights that are packed once, mapped, or read from disk as they are needed."""
