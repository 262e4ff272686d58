"""Chats: prompts from messages, answers with thoughts and tool calls, response formats."""
