"""Ollama's API, as an adapter of chats and completions: what is generated is theirs, byte for byte.

``fields`` has the bodies, ``conversation`` makes a chat or a completion of one, ``answer`` makes
Ollama's pieces of the answer, ``about`` tells of the model, ``endpoints`` puts them together. Owns
its exports.
"""

from paceline.server.ollama.about import reports
from paceline.server.ollama.endpoints import router

routers = (router, reports)

__all__ = ["routers"]
