"""OpenAI's Responses API, as an adapter of chats: what is generated is the chat's, byte for byte.

``fields`` has the bodies, ``conversation`` makes a chat of items, ``output`` makes items and events
of the chat's answer, ``answering`` puts them together, ``store`` keeps responses, ``endpoints``
serves them. Owns its exports.
"""

from paceline.server.responses.endpoints import kept, router
from paceline.server.responses.store import ResponseStore

__all__ = ["ResponseStore", "routers"]

routers = (router, kept)
