"""The search for the fastest way to speculate."""
