"""Under which names a server answers: what keeps pages of other sites from posing as its own.

A site on the web can have its own name lead to this machine (DNS rebinding). The browser then takes
that site's scripts for the server's own; but it still sends the name, as ``Host``.

The rule. A server answers requests whose host is

- an IP address, since only a name can be made to lead elsewhere, or not given, as by no browser;
- ``localhost``, the ``--host`` that it listens on, or one of ``--allowed-hosts`` (``*`` is any);
- where it listens not only for this machine: also this machine's own name, a name without a dot, or
  one under ``.local`` or ``.internal``. No site on the web can have such a name; networks at home
  and containers do.

Owns this rule. Knows no endpoint.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError

LOCAL = "localhost"
PRIVATE_ENDINGS = (".local", ".internal")


class Hosts:
    """The rule for one server; see the module's docstring."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = {LOCAL, config.host.lower(), *map(str.lower, config.allowed_hosts)}
        self._is_open = not _is_loopback(config.host)
        if self._is_open:
            self._names.add(socket.gethostname().lower())

    def check(self, given: Sequence[str]) -> None:
        """Look at the values of a request's headers ``Host``.

        Raises:
            ApiError: 403, one of them is not allowed.
        """
        for value in given:
            name = _name(value)
            if not self._allows(name):
                raise ApiError(
                    403,
                    f"the host {name[:100]!r} is not a name of this server; allowed are addresses "
                    "and localhost, and names that it is started with: --allowed-hosts NAME",
                    code="host_not_allowed",
                )

    def _allows(self, name: str) -> bool:
        if "*" in self._names or name in self._names or _address(name) is not None:
            return True
        return self._is_open and ("." not in name or name.endswith(PRIVATE_ENDINGS))


def _name(value: str) -> str:
    """A header's host without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == LOCAL if address is None else address.is_loopback
