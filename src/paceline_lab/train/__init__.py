"""Training: language models, drafts for them, heads and n-gram models."""
