"""A person at a terminal: lines that can be edited, pasted texts as one, and earlier ones again."""

from __future__ import annotations

import readline
from collections.abc import Iterable


class Terminal:
    """Reads lines by readline.

    A paste comes as one text, whatever lines it has, where the terminal tells where it begins and
    ends: GNU readline asks it to, which Python switches off; libedit, in its place on some systems,
    does not know how.

    Args:
        earlier: texts that the arrows bring back, the oldest first.
    """

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        readline.set_auto_history(False)
        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.clear_history()
        for text in earlier:
            self.remember(text)

    def read(self, prompt: str) -> str:
        """
        Raises:
            EOFError, KeyboardInterrupt: as ``input`` does.
        """
        return input(prompt)

    def remember(self, text: str) -> None:
        """Let the arrows bring a text back."""
        readline.add_history(text)
