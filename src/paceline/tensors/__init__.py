"""Weights as arrays: how they are stored, decoded and placed. Knows no model."""
