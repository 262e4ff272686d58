"""Traces: a model's recorded answers with their log-probabilities."""
