"""The readable backend in torch, row by row."""
