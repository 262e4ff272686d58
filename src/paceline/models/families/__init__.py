"""Model families as data, and what a ``config.json`` says in their terms."""
