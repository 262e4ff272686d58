"""How much memory an engine takes. Reads what the system says of its process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.server.engine_process.client import EngineClient


def memory_of(client: EngineClient) -> int:
    """Bytes of an engine that has just started, its whole KV cache included.

    Weights that are mapped count before they are read, and so does a cache before it is filled.
    """
    return used_memory(client) + client.info.kv_bytes


def used_memory(client: EngineClient) -> int:
    """Bytes that an engine takes, of its KV cache what was used so far."""
    return max(_resident(client.pid), client.info.num_bytes)


def _resident(pid: int | None) -> int:
    """Bytes of a process; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
