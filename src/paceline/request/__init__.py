"""A request and what it asks for, spans and draft trees, traces, and what engines count."""
