"""Measuring a server that speaks OpenAI's protocol: prompts, arrivals, requests, figures."""
