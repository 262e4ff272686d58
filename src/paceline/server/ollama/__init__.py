"""Ollama's API, as an adapter of chats and completions: what is generated is theirs, byte for byte.

``fields`` has the bodies, ``conversation`` makes a chat or a completion of one, ``answer`` makes
Ollama's pieces of the answer, ``endpoints`` puts them together, ``embed`` is for vectors, ``about``
tells of the model. Owns its exports.
"""

from paceline.server.ollama import embed, endpoints
from paceline.server.ollama.about import reports

routers = (endpoints.router, embed.router, reports)

__all__ = ["routers"]
