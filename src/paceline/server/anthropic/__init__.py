"""Anthropic's Messages API, as an adapter of chats: what is generated is the chat's, byte for byte.

``fields`` has the bodies, ``conversation`` makes a chat of one, ``answer`` makes messages and
events of the chat's answer, ``endpoints`` puts them together. Owns its exports.
"""

from paceline.server.anthropic.endpoints import router

__all__ = ["router"]
