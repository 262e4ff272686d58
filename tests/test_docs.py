"""The documentation against the repository: links, pages, and every name that looks like code.

Owns what counts as a name of ours. In a table that has a column headed "Paceline", only that
column speaks of us; everywhere else, an option in backticks or in a `paceline ...` command does.
Options of other programs are written together with their program: `llama-server --draft-max`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where a path in backticks may start.
BASES = ("", "src", "src/paceline", "docs", "tests")
CODE_SUFFIXES = (".py", ".md", ".toml", ".cpp", ".h", ".yml")

FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(.+?)\1")
LINK = re.compile(r"\[[^\]\n]*\]\(\s*<?([^)\s>]+)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*|-[a-zA-Z](?![\w-]))")
VARIABLE = re.compile(r"\bPACELINE_[A-Z0-9_]*[A-Z0-9]\b")


def pages(root: Path) -> list[Path]:
    top = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    cards = sorted((root / "src").rglob("README.md"))
    return [page for page in top if page.exists()] + sorted((root / "docs").rglob("*.md")) + cards


# Links


def links(text: str) -> list[str]:
    """Relative link targets, those inside code left out."""
    prose = INLINE_CODE.sub("", FENCE.sub("", text))
    return [target for target in LINK.findall(prose) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that a heading or an explicit anchor can be reached by, as GitHub makes them."""
    found: set[str] = set(ANCHOR.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        copies = sum(1 for name in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", name))
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            broken.append(f"{page.name}: no file {target}")
        elif fragment and fragment not in anchors(file.read_text(encoding="utf-8")):
            broken.append(f"{page.name}: no heading {target}")
    return broken


def unlinked_pages(root: Path) -> list[str]:
    """Pages that neither the index nor the README leads to."""
    reached = set()
    for start in (root / "docs" / "index.md", root / "README.md"):
        if start.exists():
            targets = links(start.read_text(encoding="utf-8"))
            reached |= {(start.parent / target.split("#")[0]).resolve() for target in targets}
    index = root / "docs" / "index.md"
    found = set((root / "docs").rglob("*.md")) - {index}
    return sorted(str(page.relative_to(root)) for page in found if page.resolve() not in reached)


# Tables


def headless_tables(text: str) -> list[str]:
    """First rows of tables that no line of dashes follows: they are not shown as tables."""
    lines = ["", *FENCE.sub("", text).splitlines(), ""]
    return [
        row
        for before, row, after in zip(lines, lines[1:], lines[2:], strict=False)
        if row.lstrip().startswith("|") and not before.lstrip().startswith("|")
        if not re.match(r"\s*\|[ :-]*-[ :|-]*$", after)
    ]


# Names


@dataclass(frozen=True)
class Known:
    """The names that exist: options per command, variables, targets of the Makefile."""

    root: Path = ROOT
    commands: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    other_options: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    make_targets: set[str] = field(default_factory=set)

    @property
    def options(self) -> set[str]:
        return self.other_options.union(*self.commands.values())


def code_spans(text: str) -> Iterator[str]:
    """Inline code that speaks of Paceline, by the rule at the top of this module."""
    ours: int | None = None
    for line in FENCE.sub("", text).splitlines():
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|")) if line.startswith("|") else None
        if cells is None:
            ours = None
            spoken = line
        else:
            headed = [place for place, cell in enumerate(cells) if cell.strip() == "Paceline"]
            ours = headed[0] if headed else ours
            spoken = line if ours is None else "".join(cells[ours : ours + 1])
        yield from (code.strip() for _, code in INLINE_CODE.findall(spoken))


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `paceline ...` command line, from fences and inline code."""
    fenced = "\n".join(match.group(0) for match in FENCE.finditer(text)).replace("\\\n", " ")
    for line in [*fenced.splitlines(), *code_spans(text)]:
        bare = re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line)
        if bare.startswith("paceline "):
            # Optional parts in a synopsis are written in brackets.
            yield _words(re.sub(r"[\[\]|]", " ", bare.split(" #")[0]))[1:]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # An apostrophe in a synopsis.
        return line.split()


def unknown_commands(text: str, known: Known) -> list[str]:
    """Commands with a name or an option that the command line does not have."""
    problems = []
    for words in commands(text):
        depth = 0
        while tuple(words[: depth + 1]) in known.commands and depth < len(words):
            depth += 1
        options = known.commands.get(tuple(words[:depth]), set())
        group = any(
            len(name) > depth and name[:depth] == tuple(words[:depth]) for name in known.commands
        )
        if group and len(words) > depth and re.fullmatch(r"[a-z][a-z-]*", words[depth]):
            problems.append(f"paceline {' '.join(words[: depth + 1])}: no such command")
            continue
        given = {word.split("=")[0] for word in words if OPTION.fullmatch(word.split("=")[0])}
        problems += [
            f"paceline {' '.join(words[:depth])}: no option {option}"
            for option in sorted(given - options - {"--help"})
        ]
    return problems


def unknown_options(text: str, known: Known) -> list[str]:
    """Options in backticks of their own that no command has."""
    spans = (span for span in code_spans(text) if span.startswith("--"))
    named = {option for span in spans for option in OPTION.findall(span)}
    return [f"no option {option}" for option in sorted(named - known.options - {"--help"})]


def unknown_variables(text: str, known: Known) -> list[str]:
    return [f"no variable {name}" for name in sorted(set(VARIABLE.findall(text)) - known.variables)]


def unknown_targets(text: str, known: Known) -> list[str]:
    fenced = "\n".join(match.group(0) for match in FENCE.finditer(text))
    lines = [*code_spans(text), *fenced.splitlines()]
    named = {match.group(1) for line in lines if (match := re.match(r"\$?\s*make ([a-z-]+)", line))}
    return [f"no target: make {name}" for name in sorted(named - known.make_targets)]


def missing_paths(text: str, known: Known) -> list[str]:
    """Repository paths and dotted module names in backticks that do not exist."""
    spans = set(code_spans(text))
    gone = [f"no file {span}" for span in spans if _is_path(span) and not _exists(span, known.root)]
    gone += [
        f"no module or name {span}"
        for span in spans
        if re.fullmatch(r"paceline(\.\w+)+", span) and not _defined(span, known.root / "src")
    ]
    return sorted(gone)


def _is_path(span: str) -> bool:
    # Capitals stand for a name of the reader's choice: `benchmarks/NAME.py`.
    placeholder = re.search(r"[\s<>*{}$:]", span) or re.search(r"\b[A-Z]{3,}\b(?!\.md)", span)
    local = not span.startswith(("/", "../", "~", "-"))
    shaped = span.endswith(CODE_SUFFIXES) or re.match(r"(src|docs|tests|benchmarks|csrc)/.", span)
    return bool(local and shaped and not placeholder and not span.startswith("."))


def _exists(span: str, root: Path) -> bool:
    if "/" not in span:
        return any(root.glob(span)) or any(
            any((root / top).rglob(span)) for top in ("src", "docs", "tests", "benchmarks")
        )
    return any((root / base / span).exists() for base in BASES)


def _defined(dotted: str, source: Path) -> bool:
    """Whether a dotted name is a module, or a name at the top of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = source.joinpath(*parts[:length])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                rest = parts[length : length + 1]
                return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
        if place.is_dir() and length == len(parts):
            return True
    return False


# What exists


def command_tree(command: object, name: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """Options by command path, groups included, of a Click command."""
    options = {
        text
        for parameter in command.params  # type: ignore[attr-defined]
        for text in [*parameter.opts, *parameter.secondary_opts]
        if text.startswith("-")
    }
    tree = {name: options}
    for word, child in getattr(command, "commands", {}).items():
        tree |= command_tree(child, (*name, word))
    return tree


def variables_of(command: object) -> set[str]:
    found: set[str] = set()
    for parameter in command.params:  # type: ignore[attr-defined]
        names = parameter.envvar or []
        found |= {names} if isinstance(names, str) else set(names)
    for child in getattr(command, "commands", {}).values():
        found |= variables_of(child)
    return found


def option_literals(root: Path) -> set[str]:
    """Options that the benchmarks define: string constants that look like one."""
    found = set()
    for file in (root / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if OPTION.fullmatch(node.value) else set()
    return found


@cache
def known_names() -> Known:
    # Imported here: the checks themselves can be tested without Paceline.
    from typer.main import get_command

    from paceline.cli.main import app

    command = get_command(app)
    tests = [ROOT / "tests/conftest.py", ROOT / "tests/toy.py"]
    sources = [ROOT / "Makefile", *(ROOT / "src").rglob("*.py"), *tests]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return Known(
        commands=command_tree(command),
        other_options=option_literals(ROOT),
        variables=variables_of(command) | set(VARIABLE.findall(text)),
        make_targets=set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)),
    )


NAME_CHECKS: list[Callable[[str, Known], list[str]]] = [
    unknown_commands,
    unknown_options,
    unknown_variables,
    unknown_targets,
    missing_paths,
]
PAGES = pages(ROOT)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_page_is_linked() -> None:
    assert unlinked_pages(ROOT) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_tables_have_heads(page: Path) -> None:
    assert headless_tables(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
@pytest.mark.parametrize("check", NAME_CHECKS)
def test_names_exist(page: Path, check: Callable[[str, Known], list[str]]) -> None:
    assert check(page.read_text(encoding="utf-8"), known_names()) == []


# The checks themselves

SAMPLE = Known(
    commands={
        (): {"--version"},
        ("run",): {"--top-k", "-k", "--seed"},
        ("train",): set(),
        ("train", "lm"): {"--steps"},
    },
    other_options={"--quick"},
    variables={"PACELINE_SEED"},
    make_targets={"test"},
)


@pytest.mark.parametrize(
    ("check", "text", "problems"),
    [
        (unknown_commands, "`paceline run MODEL -k 4 --seed=1`", 0),
        (unknown_commands, "`paceline run --steps 3`", 1),
        (unknown_commands, "`paceline train lm --steps 3`", 0),
        (unknown_commands, "`paceline fly`", 1),
        (unknown_commands, "`paceline train fly`", 1),
        (unknown_commands, "```\n$ paceline run \\\n  --seed 1 --fast\n```", 1),
        (unknown_commands, "```\nllama-server --fast\n```", 0),
        (unknown_commands, "```\npaceline run [MODEL] [--seed N | --top-k N] # --fast\n```", 0),
        (unknown_options, "`--seed`, `--quick` and `--help`", 0),
        (unknown_options, "`--gamma N`", 1),
        (unknown_options, "`llama-server --gamma`", 0),
        (unknown_options, "| vLLM | Paceline |\n|---|---|\n| `--gamma` | `--seed` |", 0),
        (unknown_options, "| vLLM | Paceline |\n|---|---|\n| `--seed` | `--gamma` |", 1),
        (unknown_options, "| option | use |\n|---|---|\n| `--gamma` | |", 1),
        (unknown_variables, "`PACELINE_SEED` and `PACELINE_<NAME>`", 0),
        (unknown_variables, "PACELINE_GAMMA", 1),
        (unknown_targets, "`make test`\n```\nmake test ARGS=-x\n```", 0),
        (unknown_targets, "```\nmake coffee\n```", 1),
        (missing_paths, "`tests/test_docs.py`, `test_docs.py`, `benchmarks/NAME.py`, `x.gguf`", 0),
        (missing_paths, "`engine/gearbox.py`", 1),
        (missing_paths, "`gearbox.py` and `docs/gearbox.md`", 2),
        (missing_paths, "`paceline.gearbox.Gear`", 1),
    ],
)
def test_name_checks_can_fail(
    check: Callable[[str, Known], list[str]], text: str, problems: int
) -> None:
    assert len(check(text, SAMPLE)) == problems


def test_a_torn_table_is_seen() -> None:
    table = "| a | b |\n|---|---:|\n| 1 | 2 |\n"
    assert headless_tables(f"text\n\n{table}| 3 | 4 |\n") == []
    assert headless_tables(f"{table}\n| 3 | 4 |\n") == ["| 3 | 4 |"]


def test_link_checks_can_fail(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[a](a.md) [b](a.md#two-words-1) [c](#nowhere) [d](gone.md)")
    (docs / "a.md").write_text("# Two `words`\n## Two words\n```\n[e](gone.md)\n```")
    (docs / "lost.md").write_text("[f](https://example.org) `[g](gone.md)`")
    assert broken_links(docs / "index.md") == [
        "index.md: no heading #nowhere",
        "index.md: no file gone.md",
    ]
    assert broken_links(docs / "a.md") == []
    assert broken_links(docs / "lost.md") == []
    assert unlinked_pages(tmp_path) == ["docs/lost.md"]
