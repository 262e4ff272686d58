"""A server for the clients of OpenAI, Anthropic, Ollama and llama.cpp."""
