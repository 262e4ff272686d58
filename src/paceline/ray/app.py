"""From options by their names to an application: what a configuration file of Serve's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ray import serve

from paceline.cli.model_argument import with_model
from paceline.cli.serve import ServeOptions, num_replicas, replicated, threads_of
from paceline.core.errors import ConfigError
from paceline.ray.deployments import application

NOT_HERE = ("host", "port", "ray_address")
"""Options of the process that Serve's own configuration replaces."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """See :func:`paceline.ray.build_app`."""
    known = [each.name for each in fields(ServeOptions) if each.name not in NOT_HERE]
    if unknown := sorted(set(args) - set(known)):
        raise ConfigError(f"args has {', '.join(unknown)}; allowed: {', '.join(known)}")
    options = with_model(ServeOptions(**args), "paceline serve")
    served = replicated(options, shares_machine=False)
    return application(served, num_replicas(options), threads_of(options))
