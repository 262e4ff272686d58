"""Trains n-gram models, and reads and writes those of others. Owns nothing but its modules."""
