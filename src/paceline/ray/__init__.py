"""Replicas of a server on a Ray cluster; needs the extra ``ray``.

Ray Serve starts, watches and replaces the processes. What is here forwards requests to them and
says which replica answers which request. Importing this needs no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(args: Mapping[str, Any]) -> Any:
    """An application for ``serve run`` and Serve's configuration files.

    Args:
        args: options of ``paceline serve`` by their names in Python, such as ``model``,
            ``replicas`` and ``max_model_len``.

    Returns:
        a ``ray.serve.Application``.

    Raises:
        ConfigError: an option is unknown or not acceptable.
    """
    from paceline.cli import serve

    return serve.build_app(args)
