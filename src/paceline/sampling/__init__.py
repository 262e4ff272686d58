"""The target's token: rules of sampling, edits of logits, words that must not come."""
