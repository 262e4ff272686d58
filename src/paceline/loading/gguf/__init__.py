"""Models in GGUF files, told in the terms of their ``config.json``."""
