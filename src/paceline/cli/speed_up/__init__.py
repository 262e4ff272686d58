"""Commands that find out what is fast, and why."""
