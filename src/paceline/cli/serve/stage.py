"""``paceline stage``: layers of a model for an engine on another host."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.options.options import option


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StageOptions:
    """Where engines find it."""

    listen: str = option("127.0.0.1:7100", "HOST:PORT to listen on; port 0 chooses a free one.")


def stage_command(options: StageOptions) -> int:
    """The work of ``paceline stage``."""
    from paceline.stages.link import address_of, shown_address
    from paceline.stages.worker import listen

    host, port = address_of(options.listen)
    listen((host, port), lambda at: print(f"listening at {shown_address(host, at)}", flush=True))
    return 0
