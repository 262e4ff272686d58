"""What to verify and what it costs. No torch in here."""
