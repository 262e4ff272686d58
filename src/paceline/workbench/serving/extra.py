"""aiohttp, which benchmarks of servers need and a plain installation lacks. Says how to get it."""

from paceline.core.errors import ConfigError
from paceline.core.installation import install_command

try:
    import aiohttp
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"benchmarks of servers need the extra: {install_command('bench')} ({missing})"
    ) from missing

__all__ = ["aiohttp"]
