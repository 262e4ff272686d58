"""Outputs held to a grammar: its compiler and their process, constraints, thoughts."""
