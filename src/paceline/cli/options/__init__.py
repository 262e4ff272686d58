"""Options that commands share, and what they resolve to."""
