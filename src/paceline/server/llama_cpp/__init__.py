"""Paths that llama.cpp's and vLLM's clients know besides OpenAI's."""
