"""Installs plugins for a test: a module and the metadata that pip would have written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from paceline.config import SpeculativeConfig, speculative
from paceline.config.speculative import ENTRY_POINTS, PluginConfig
from paceline.proposers.base import Proposer
from paceline.proposers.plugin import PluginProposer
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

Install = Callable[[str, Mapping[str, str]], None]


def installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str = ENTRY_POINTS
) -> Install:
    """Makes a module ``some_plugin`` of a source, with entry points by their names."""

    def install(source: str, entries: Mapping[str, str]) -> None:
        (tmp_path / "some_plugin.py").write_text(source)
        metadata = tmp_path / "some_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n"
        )
        lines = [f"{name} = {value}\n" for name, value in entries.items()]
        (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "some_plugin", raising=False)

    return install


class Repeats:
    """A plugin with nothing but what is needed: a token is followed by what followed it before."""

    def __init__(self, config: SpeculativeConfig, target: object) -> None:
        self.length = config.options.get("length", 3)

    def propose(self, requests: list[Request], budget: object) -> list[DraftTree]:
        return [self.draft(request.token_ids) for request in requests]

    def draft(self, tokens: list[int]) -> DraftTree:
        for at in range(len(tokens) - 2, -1, -1):
            if tokens[at] == tokens[-1]:
                run = tokens[at + 1 : at + 1 + self.length]
                return DraftTree.chain(run, [0.7] * len(run))
        return DraftTree()

    def observe(self, request: Request, result: VerifyResult) -> None: ...

    def finish(self, request: Request) -> None: ...


def repeating_plugin() -> Proposer:
    # Which methods there are is checked where a plugin is installed; here is only its object.
    with patch.object(speculative, "plugins", return_value=("repeats",)):
        config = PluginConfig("repeats")
    return PluginProposer(config, Repeats(config, None))
