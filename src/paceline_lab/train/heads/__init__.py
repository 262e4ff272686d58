"""Heads that draft from their target's hidden states: their data, modules, losses and training."""
