"""What messages say about installing more of Paceline."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from paceline.core import installation
from paceline.core.installation import install_command, pip_install, requirement
from tests.builds import ROOT

WHEEL = "/tmp/wheels/paceline-0.1.0-cp311-cp311-linux_x86_64.whl"
# As pip 23.2.1 writes them for: -e FOLDER, FOLDER, WHEEL, git+URL@main, an address of an archive.
RECORDED = [
    ('{"dir_info": {"editable": true}, "url": "file:///home/me/p%20k"}', "-e '/home/me/p k[ray]'"),
    ('{"dir_info": {}, "url": "file:///home/me/paceline"}', "'/home/me/paceline[ray]'"),
    (
        '{"archive_info": {"hash": "sha256=6f", "hashes": {"sha256": "6f"}}, '
        f'"url": "file://{WHEEL}"}}',
        f"'{WHEEL}[ray]'",
    ),
    (
        '{"url": "https://git.example/paceline.git", '
        '"vcs_info": {"commit_id": "6f", "requested_revision": "main", "vcs": "git"}}',
        "'paceline[ray] @ git+https://git.example/paceline.git@main'",
    ),
    (
        '{"url": "file:///srv/all.git", "subdirectory": "engine", '
        '"vcs_info": {"commit_id": "6f", "vcs": "git"}}',
        "'paceline[ray] @ git+file:///srv/all.git#subdirectory=engine'",
    ),
    (
        '{"archive_info": {}, "url": "https://files.example/paceline-0.1.0.tar.gz"}',
        "'paceline[ray] @ https://files.example/paceline-0.1.0.tar.gz'",
    ),
]


@pytest.mark.parametrize(("recorded", "arguments"), RECORDED)
def test_an_extra_is_asked_of_where_the_installed_one_came_from(
    recorded: str, arguments: str
) -> None:
    assert shlex.join(requirement(json.loads(recorded), "ray")) == arguments


def test_one_from_an_index_has_a_name() -> None:
    assert requirement(None) == ["paceline"]
    assert requirement(None, "ray") == ["paceline[ray]"]


class Recorded:
    """A distribution that an installer made."""

    def __init__(self, installer: str, origin: str | None) -> None:
        self._files = {"INSTALLER": f"{installer}\n", "direct_url.json": origin}

    def read_text(self, name: str) -> str | None:
        return self._files[name]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of an environment that is not the shell's."""
    monkeypatch.setattr(sys, "executable", "/srv/env/bin/python")


def test_the_command_is_that_of_the_installer(
    monkeypatch: pytest.MonkeyPatch, elsewhere: None, tmp_path: Path
) -> None:
    def install(*recorded: str | None) -> None:
        monkeypatch.setattr(installation, "distribution", lambda name: Recorded(*recorded))

    origin = RECORDED[0][0]
    install("pip", origin)
    assert install_command("ray") == "/srv/env/bin/python -m pip install -e '/home/me/p k[ray]'"
    install("uv", origin)
    expected = "uv pip install --python /srv/env/bin/python"
    assert install_command("ray") == f"{expected} -e '/home/me/p k[ray]'"
    assert pip_install("a>1") == f"{expected} 'a>1'"
    install("pip", None)
    assert install_command() == "/srv/env/bin/python -m pip install paceline"
    pip = tmp_path / "pip"
    pip.write_text("")
    pip.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install_command() == "pip install paceline"


def test_modules_that_were_never_installed_are_a_checkout_or_have_a_name(
    monkeypatch: pytest.MonkeyPatch, elsewhere: None, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise installation.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert install_command("ray").endswith(f"install -e {shlex.quote(f'{ROOT}[ray]')}")
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    assert install_command("ray").endswith("install 'paceline[ray]'")


def test_no_text_spells_an_installation_out() -> None:
    """A name that is not registered may be registered by anybody."""
    modules = {*ROOT.glob("src/**/*.py")} - {Path(installation.__file__)}
    by_hand = re.compile(r"pip install|paceline\[")
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    by_name = re.compile(r"paceline\[|pip install ['\"]?paceline\b")
    spelled = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for paths, pattern in ((modules, by_hand), (documents, by_name))
        for path in sorted(paths)
        for found in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert spelled == []
