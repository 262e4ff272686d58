"""OpenAI's Responses API, as an adapter of chats: what is generated is the chat's, byte for byte.

``request`` has the bodies and makes a chat of items, ``answer`` makes items and events of the
chat's answer and keeps them, ``endpoints`` serves both. Owns its exports.
"""

from paceline.server.responses.answer import ResponseStore
from paceline.server.responses.endpoints import router

__all__ = ["ResponseStore", "router"]
