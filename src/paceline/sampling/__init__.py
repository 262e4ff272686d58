"""The target's token: parameters' rules, edits of logits, words that must not come."""
