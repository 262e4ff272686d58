"""Text to tokens and back: tokenizers, chat templates and their process, gaps to fill."""
