"""Whether speculation changes a token."""
