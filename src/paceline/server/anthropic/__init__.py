"""Anthropic's Messages API, as an adapter of chats: what is generated is the chat's, byte for byte.

``request`` has the bodies and makes a chat of one, ``messages`` tells its answer. Owns its exports.
"""

from paceline.server.anthropic.messages import router

__all__ = ["router"]
