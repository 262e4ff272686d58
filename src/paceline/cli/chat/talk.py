"""The conversation of ``paceline run``: what a person types, carried out until they leave."""

from __future__ import annotations

from collections.abc import Callable

from paceline.cli.chat.conversation import Conversation
from paceline.cli.chat.talk_commands import carry_out
from paceline.cli.chat.talk_input import Command, Read, typed
from paceline.core.errors import ConfigError, RequestError

Remember = Callable[[str], None]


def talk(conversation: Conversation, read: Read, remember: Remember = lambda text: None) -> int:
    """Go on until the end of input; returns the exit code.

    Args:
        remember: gets what was typed, as long as that is wanted.
    """
    screen = conversation.screen
    uses_chat = conversation.encoder.uses_chat
    subject = "chat" if uses_chat else "texts to continue (the model has no chat template)"
    screen.note(f"{subject}; Ctrl-C ends an answer, Ctrl-D or /bye leaves, /? helps")
    screen.legend()
    while True:
        try:
            asked = typed(read)
        except EOFError:
            screen.say("")
            return 0
        except KeyboardInterrupt:
            screen.say("")
            screen.note("Ctrl-D or /bye leaves")
            continue
        if conversation.keeps_typed and str(asked).strip():
            remember(str(asked))
        try:
            if isinstance(asked, Command):
                if not carry_out(conversation, asked):
                    return 0
            elif asked.strip():
                conversation.ask(asked)
        except (RequestError, ConfigError) as error:
            screen.note(f"error: {error}")
