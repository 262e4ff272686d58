"""The command line called in this process, as a user would call it."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.loading.catalogue import EMBEDDED
from tests.loading.catalogues import isolate

ASKING = ("run", "serve", "verify", "explain", "tune", "profile", "trace", "run-batch")
"""Commands that ask the embedded model in tests that name none, nor files that do."""
CURVE = {"name": "GPU", "cost_ratio": [1.0, 1.1, 1.2, 1.3, 1.4], "draft_step_ratio": 0.2}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that stdout is, in one line."""
        (line,) = self.out.splitlines()
        return json.loads(line)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settings and folders of whoever runs the tests must not leak into them, nor the network."""
    for name in [n for n in os.environ if n.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    isolate(monkeypatch, tmp_path_factory.mktemp("home"))


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        is_told = "--import" in arguments or {"--traces", "--prompts"} & {*arguments} == {
            "--traces"
        }
        capsys.readouterr()
        with monkeypatch.context() as patch:
            if arguments[1:] and arguments[0] in ASKING and not is_told:
                patch.setenv("PACELINE_MODEL", os.environ.get("PACELINE_MODEL", EMBEDDED))
            with pytest.raises(SystemExit) as end:
                main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def quick_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of few steps: what it says is of no account, only that it is there.

    It is kept, however busy the machine is.
    """
    monkeypatch.setattr("paceline.profiling.profile.BUSY", math.inf)
    few = {"WARM_UP_STEPS": 2, "STEPS": 8, "WARM_UP_SECONDS": 0.0, "DRAFTED_STEPS": 40}
    for name, value in few.items():
        monkeypatch.setattr(f"paceline.profiling.profile_host.{name}", value)
    # The roofs are of a size that no cache holds.
    monkeypatch.setattr("paceline.profiling.machine.READ_BYTES", 1 << 20)
    monkeypatch.setattr("paceline.profiling.machine.GEMM_WIDTH", 64)


@pytest.fixture
def cost(cli: Callable[..., Result], tmp_path: Path) -> tuple[str, ...]:
    """Options that name a curve, so that nothing is measured."""
    curves = tmp_path / "curves.json"
    curves.write_text(json.dumps({"curves": [CURVE]}))
    assert cli("profile", "--import", str(curves)).code == 0
    return "--cost", "GPU"
