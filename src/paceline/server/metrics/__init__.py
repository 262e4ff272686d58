"""What the server counts, and under which names it tells."""
