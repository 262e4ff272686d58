"""Paceline as a library: models, their answers, and batches of them."""
