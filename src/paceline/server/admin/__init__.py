"""Health, models and adapters of a server, and how fast speculation makes it."""
