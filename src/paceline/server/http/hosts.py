"""Under which names a server answers: what keeps pages of other sites from posing as its own.

A site on the web can have its own name lead to this machine (DNS rebinding). The browser then takes
that site's scripts for the server's own; but it still sends the name, as ``Host``.

The rule. A server that requires API keys answers under every name, as a site's scripts have no key:
a browser keeps one for the name under which it was given. Another answers requests whose host is

- an IP address, since only a name can be made to lead elsewhere, or not given, as by no browser;
- ``localhost``, the ``--host`` that it listens on, or one of ``--allowed-hosts`` (``*`` is any);
- a name under ``.localhost`` or ``.internal``, such as a container's for the machine it runs on;
- where it listens not only for this machine: also this machine's own name, short or full, a name
  without a dot, or one under ``.local`` or ``.svc``, as networks at home and clusters have them.

No site on the web can have a name under these endings or without a dot.

Owns this rule. Knows no endpoint.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import ApiError

LOCAL = "localhost"
ENDINGS = (".localhost", ".internal")
ENDINGS_ON_NETWORKS = (".local", ".svc")


class Hosts:
    """The rule for one server; see the module's docstring."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = {LOCAL, config.host.lower(), *map(str.lower, config.allowed_hosts)}
        self._has_keys = bool(config.api_keys)
        self._is_open = not _is_loopback(config.host)
        if self._is_open and not self._has_keys:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(self, given: Sequence[str]) -> None:
        """Look at the values of a request's headers ``Host``.

        Raises:
            ApiError: 403, one of them is not allowed.
        """
        for value in () if self._has_keys else given:
            name = _name(value)
            if not self._allows(name):
                raise ApiError(
                    403,
                    f"the host {name[:100]!r} is not a name of this server; allowed: addresses "
                    "and localhost, and names that it is started with: --allowed-hosts NAME",
                    code="host_not_allowed",
                )

    def _allows(self, name: str) -> bool:
        if "*" in self._names or name in self._names or _address(name) is not None:
            return True
        if name.endswith(ENDINGS):
            return True
        return self._is_open and ("." not in name or name.endswith(ENDINGS_ON_NETWORKS))


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
