"""Ollama's API, as an adapter of chats and completions: what is generated is theirs, byte for byte.

``request`` has the bodies and makes a chat or a completion of one, ``endpoints`` tells the answer
in Ollama's form, ``about`` tells of the model. Owns its exports.
"""

from paceline.server.ollama import about, endpoints

routers = (endpoints.router, about.router)

__all__ = ["routers"]
