"""The floors: imports go downward only, and some floors may not know some things.

Owns the table of floors and the rules; reads source text alone and imports nothing of Paceline.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

FLOORS = (
    {"core"},
    {"config", "json_schema", "tensors", "text"},
    {"request"},
    {"models", "structured"},
    {"cache", "loading"},
    {"backends"},
    {"disk", "sampling"},
    {"planner"},
    {"proposers", "server", "stages"},
    {"engine"},
    {"build"},
    {"profiling"},
    {"api"},
    {"ray"},
    {"cli"},
    {"__main__", "__init__"},
)
"""Rooms, from the ground up. Each may import those of lower floors, and neighbours never."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LABORATORY = "paceline_lab"
"""A package on top of the product, which does not know it."""
ONE_GROUP = {"cli", "__main__", "__init__"}
"""These alone know each other."""
FACADES = {"__main__", "__init__", "ray"}
"""Modules that users name, above all floors: the package, and the application that Serve builds."""
TORCH_FREE = {"core", "config", "json_schema", "text", "request", "structured", "planner", "server"}
DEVICE_QUESTIONS = {"cuda", "is_cuda", "is_cpu", "is_mps", "is_xpu"}
KNOWS_DEVICES = FLOOR_OF["backends"]
"""Up to this floor, code may ask which device it runs on."""


@dataclass(frozen=True)
class Import:
    """One import: `target` is a dotted name, relative to the package if `internal`."""

    module: str
    target: str
    internal: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@dataclass(frozen=True)
class Tree:
    """A parsed package: module name (dotted, relative to the package) -> syntax tree."""

    modules: dict[str, ast.Module]
    packages: frozenset[str]
    name: str = "paceline"

    @classmethod
    def read(cls, root: Path, name: str = "paceline") -> Tree:
        modules, packages = {}, set()
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__" and len(parts) > 1:
                parts = parts[:-1]
                packages.add(".".join(parts))
            modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
        return cls(modules, frozenset(packages), name)

    def imports(self) -> Iterator[Import]:
        for module, syntax in self.modules.items():
            yield from self._imports_of(module, syntax)

    def _imports_of(self, module: str, node: ast.AST) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target, internal in self._targets(module, child):
                    yield Import(module, target, internal, child.lineno)
            elif named := _imported_by_name(child):
                yield Import(module, *self._place(named), child.lineno)
            else:
                yield from self._imports_of(module, child)

    def _targets(
        self, module: str, node: ast.Import | ast.ImportFrom
    ) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield self._place(alias.name)
            return
        base = self._absolute(module, node)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            if full == "paceline.__version__":
                continue  # A constant of the package root, of use on every floor.
            is_module = full.removeprefix(f"{self.name}.") in self.modules
            yield self._place(full if is_module else base)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = [self.name, *module.split(".")]
        # A package's own name is the folder that one dot means; a module's is one deeper.
        depth = node.level - 1 if module in self.packages else node.level
        return ".".join([*here[: len(here) - depth], *filter(None, [node.module])])

    def _place(self, name: str) -> tuple[str, bool]:
        if name == self.name:
            return "__init__", True
        if name.startswith(f"{self.name}."):
            return name.removeprefix(f"{self.name}."), True
        return name, False


def _imported_by_name(node: ast.AST) -> str | None:
    """The module that ``importlib.import_module("...")`` imports."""
    match node:
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ) if name.startswith(("paceline.", f"{LABORATORY}.")):
            return name
    return None


def component(module: str) -> str:
    return module.split(".")[0]


def unplaced_modules(tree: Tree) -> list[str]:
    return sorted({component(module) for module in tree.modules} - FLOOR_OF.keys())


def upward_imports(tree: Tree) -> list[str]:
    """Every import that does not go down, those for type checking alone included."""
    return [str(edge) for edge in tree.imports() if edge.internal and not _goes_down(edge)]


def _goes_down(edge: Import) -> bool:
    here, there = component(edge.module), component(edge.target)
    if here == there:
        return _proposers_stay_apart(edge) if here == "proposers" else True
    if edge.module in FACADES or {here, there} <= ONE_GROUP:
        return True
    return FLOOR_OF.get(there, 99) < FLOOR_OF.get(here, 99)


def _proposers_stay_apart(edge: Import) -> bool:
    if edge.module == "proposers":  # its __init__ is the registry
        return True
    own, other = (name.split(".")[1:2] for name in (edge.module, edge.target))
    return other in (["base"], own)


def knowledge_of_the_laboratory(tree: Tree) -> list[str]:
    """Imports of the laboratory by the product."""
    return [str(edge) for edge in tree.imports() if component(edge.target) == LABORATORY]


def import_cycles(tree: Tree) -> list[str]:
    """Circles among modules, those by an import for type checking alone included."""
    return _cycles(tree, lambda module: module)


def folder_cycles(tree: Tree) -> list[str]:
    """Circles among folders, a folder's own modules apart from those of its sub-folders."""

    def folder(module: str) -> str:
        if module in FACADES:
            return ""
        return module if module in tree.packages else module.rpartition(".")[0]

    return _cycles(tree, folder)


def _cycles(tree: Tree, node_of: Callable[[str], str]) -> list[str]:
    graph: dict[str, set[str]] = {node_of(module): set() for module in tree.modules}
    for edge in tree.imports():
        if edge.internal and edge.target in tree.modules:
            here, there = node_of(edge.module), node_of(edge.target)
            if here != there and here and there:  # the root's modules and facades are of no folder
                graph[here].add(there)
    done: set[str] = set()
    cycles: list[str] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return cycles


def forbidden_knowledge(tree: Tree) -> list[str]:
    """Imports of libraries that the floor must not know."""
    found = []
    for edge in tree.imports():
        here = component(edge.module)
        if here in TORCH_FREE and component(edge.target) == "torch":
            found.append(str(edge))
        if here == "engine" and any("tokenizer" in part for part in edge.target.split(".")):
            found.append(str(edge))
    return found


def device_questions(tree: Tree) -> list[str]:
    """Places above `models/` that ask, or decide by, the device they run on."""
    return [
        f"{module}:{node.lineno} asks for .{node.attr}"
        for module, syntax in tree.modules.items()
        if FLOOR_OF.get(component(module), 99) > KNOWS_DEVICES
        for node in ast.walk(syntax)
        if isinstance(node, ast.Attribute) and _is_device_question(node)
    ]


def _is_device_question(node: ast.Attribute) -> bool:
    of_device = node.attr == "type" and ast.unparse(node.value).split(".")[-1] == "device"
    return node.attr in DEVICE_QUESTIONS or of_device


CHECKS = [
    unplaced_modules,
    upward_imports,
    knowledge_of_the_laboratory,
    import_cycles,
    folder_cycles,
    forbidden_knowledge,
    device_questions,
]


@pytest.fixture(scope="module")
def paceline() -> Tree:
    return Tree.read(SOURCE / "paceline")


@pytest.mark.parametrize("check", CHECKS)
def test_paceline_keeps_its_floors(check, paceline: Tree) -> None:
    problems = check(paceline)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("check", [import_cycles, folder_cycles])
def test_the_laboratory_has_no_circles(check) -> None:
    problems = check(Tree.read(SOURCE / LABORATORY, LABORATORY))
    assert not problems, "\n".join(problems)


MOST_FILES = 25
"""Of a folder, its sub-folders' left out."""


def repeated_classes(trees: Sequence[Tree]) -> list[str]:
    """Names of public classes that more than one module has."""
    modules: dict[str, list[str]] = {}
    for tree in trees:
        for module, syntax in tree.modules.items():
            for node in syntax.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules.setdefault(node.name, []).append(f"{tree.name}.{module}")
    return [f"{name}: {', '.join(where)}" for name, where in modules.items() if len(where) > 1]


def full_folders(tree: Tree) -> list[str]:
    """Folders with more files than somebody looks through."""
    counts = Counter(module.rpartition(".")[0] for module in tree.modules)
    return [f"{folder}: {count} files" for folder, count in counts.items() if count > MOST_FILES]


def test_a_class_name_has_one_meaning(paceline: Tree) -> None:
    laboratory = Tree.read(SOURCE / LABORATORY, LABORATORY)
    assert repeated_classes([paceline, laboratory]) == []
    assert full_folders(paceline) == full_folders(laboratory) == []


def test_names_and_folders_that_are_too_full_are_found(tmp_path: Path) -> None:
    files = {f"core/a{number}.py": "" for number in range(MOST_FILES + 1)}
    tree = make_tree(tmp_path, files | {"core/a0.py": "class A: ...", "api/b.py": "class A: ..."})
    assert repeated_classes([tree]) == ["A: paceline.api.b, paceline.core.a0"]
    assert full_folders(tree) == [f"core: {MOST_FILES + 1} files"]


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree.read(root)


@pytest.mark.parametrize(
    ("check", "files", "problem"),
    [
        (unplaced_modules, {"gearbox.py": ""}, "gearbox"),
        (upward_imports, {"core/a.py": "import paceline.engine.verifier"}, "engine.verifier"),
        (
            upward_imports,
            {"core/a.py": "def f():\n    from paceline.api.llm import LLM"},
            "core.a:2",
        ),
        (upward_imports, {"cache/a.py": "from ..engine import step"}, "imports engine"),
        (upward_imports, {"cache/__init__.py": "from ..cli import app"}, "imports cli"),
        (upward_imports, {"cache/a.py": "from paceline.loading import hub"}, "loading"),
        (upward_imports, {"server/a.py": "from paceline.profiling import doctor"}, "profiling"),
        (
            knowledge_of_the_laboratory,
            {"cli/a.py": "def f():\n    from paceline_lab.tune import search"},
            "paceline_lab.tune",
        ),
        (
            knowledge_of_the_laboratory,
            {"cli/a.py": "import importlib\nimportlib.import_module('paceline_lab.tune')"},
            "paceline_lab.tune",
        ),
        (
            upward_imports,
            {"core/a.py": "if TYPE_CHECKING:\n    from paceline.cache import states"},
            "cache",
        ),
        (
            upward_imports,
            {"core/a.py": "import importlib\nimportlib.import_module('paceline.api')"},
            "api",
        ),
        (
            upward_imports,
            {"proposers/a.py": "from .b import x", "proposers/b.py": ""},
            "proposers.b",
        ),
        (upward_imports, {"engine/a.py": "from paceline import LLM"}, "__init__"),
        (
            import_cycles,
            {
                "request/span.py": "from paceline.request.request import R",
                "request/request.py": "from .span import S",
            },
            "request.request -> request.span -> request.request",
        ),
        (
            import_cycles,
            {
                "engine/a.py": "from paceline.engine import b",
                "engine/b.py": "def f():\n    from . import a",
                "engine/__init__.py": "",
            },
            "engine.a -> engine.b -> engine.a",
        ),
        (
            import_cycles,
            {
                "core/a.py": "if TYPE_CHECKING:\n    from paceline.core.b import R",
                "core/b.py": "from .a import S",
            },
            "core.a -> core.b -> core.a",
        ),
        (
            folder_cycles,
            {
                "engine/a.py": "from paceline.engine.parts.b import B",
                "engine/parts/b.py": "from paceline.engine.c import C",
                "engine/c.py": "",
            },
            "engine -> engine.parts -> engine",
        ),
        (forbidden_knowledge, {"planner/a.py": "import torch.nn"}, "torch.nn"),
        (forbidden_knowledge, {"core/a.py": "def f():\n    from torch import Tensor"}, "torch"),
        (forbidden_knowledge, {"engine/a.py": "import tokenizers"}, "tokenizers"),
        (
            forbidden_knowledge,
            {"engine/a.py": "from paceline.text.tokenizer import T", "text/tokenizer.py": ""},
            "text.tokenizer",
        ),
        (device_questions, {"sampling/a.py": "fast = torch.cuda.is_available()"}, ".cuda"),
        (device_questions, {"engine/a.py": "if x.device.type == 'cpu': pass"}, ".type"),
        (device_questions, {"api/llm.py": "if logits.is_cuda: pass"}, ".is_cuda"),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, check, files: dict[str, str], problem: str) -> None:
    problems = check(make_tree(tmp_path, files))
    assert len(problems) == 1
    assert problem in problems[0]


def test_what_the_floors_allow_passes(tmp_path: Path) -> None:
    tree = make_tree(
        tmp_path,
        {
            "__init__.py": "def __getattr__(name):\n    from paceline.api.llm import LLM",
            "core/errors.py": "from paceline import __version__",
            "request/span.py": "import paceline.core.errors",
            "request/request.py": "from .span import Span",
            "backends/rows.py": "import torch\nfast = torch.cuda.is_available()",
            "proposers/__init__.py": "from .a import A\nfrom .tree.grow import G",
            "proposers/base.py": "from paceline.request.span import Span",
            "proposers/a.py": "from paceline.proposers.base import merge",
            "proposers/tree/grow.py": "from paceline.proposers.tree.node import N",
            "proposers/tree/node.py": "from paceline.request.span import Span",
            "engine/engine.py": "import torch\nfrom paceline.cache.kv_cache import KVCache",
            "cache/kv_cache.py": "kind = type(x).type",
            "api/llm.py": "from paceline.engine.engine import Engine\nimport tokenizers",
            "cli/main.py": "from paceline import LLM",
        },
    )
    assert not [problem for check in CHECKS for problem in check(tree)]
