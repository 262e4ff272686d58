"""How models write tool calls: each kind of format, read and enforced."""
