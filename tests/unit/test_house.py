"""The house rules that can be checked: sizes, names, layers of imports, a line per file in each room's README."""

import ast
import importlib
import pkgutil
import re
import statistics
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("sandboxes", "envs", "agents", "trainer")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source_files() -> list[Path]:
    spine = sorted((ROOT / "src" / "driftgym").glob("*.py"))
    return spine + [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def length(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def depth(node: ast.AST) -> int:
    """The deepest nesting of blocks below `node`; an `elif` is as deep as its `if`, and functions start anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_sizes(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, "a module has at most 400 lines"
    for node in definitions(path):
        limit = 250 if isinstance(node, ast.ClassDef) else 60
        assert length(node) <= limit, f"{node.name} has {length(node)} lines, at most {limit} are allowed"
        if not isinstance(node, ast.ClassDef):
            assert depth(node) <= 3, f"{node.name} is nested {depth(node)} deep, at most 3 are allowed"


def test_functions_are_short_in_the_middle() -> None:
    lengths = [
        length(node) for path in source_files() for node in definitions(path) if not isinstance(node, ast.ClassDef)
    ]
    assert statistics.median(lengths) <= 12


def public_definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of public classes, functions and methods of a module, and whether each has a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield "the module", ast.get_docstring(tree) is not None
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) is not None


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_what_is_public_has_a_docstring(path: Path) -> None:
    assert [name for name, documented in public_definitions(path) if not documented] == []


def readme_folders() -> list[Path]:
    return [readme.parent for room in ROOMS for readme in sorted((ROOT / room).rglob("README.md"))]


def nearest_readme(path: Path) -> Path:
    return next(folder for folder in path.parents if folder in readme_folders())


@pytest.mark.parametrize("folder", readme_folders(), ids=relative)
def test_a_readme_has_a_line_per_file(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py" and nearest_readme(path) == folder]
    names = {str(path.relative_to(folder)) for path in files}
    assert sorted(name for name in names if f"`{name}`" not in text and f"`{Path(name).name}`" not in text) == []
    known = names | {Path(name).name for name in names} | {"__init__.py"}
    assert sorted(set(re.findall(r"`([a-z_/]+\.py)`", text)) - known) == []


def test_every_room_has_a_readme() -> None:
    assert {folder for folder in readme_folders() if folder.parent == ROOT} == {ROOT / room for room in ROOMS}


IMPORT_ALL = """
import importlib, pkgutil, sys
import driftgym
for module in pkgutil.walk_packages(driftgym.__path__, "driftgym."):
    importlib.import_module(module.name)
bare = sorted({"envs", "agents", "trainer", "sandboxes"} & set(sys.modules))
sys.exit(f"importable by bare name: {bare}" if bare else 0)
"""


def test_no_room_is_importable_by_its_bare_name(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    for room in ROOMS:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", f"import {room}"], cwd=tmp_path, capture_output=True, timeout=30, check=False
        )
        assert probe.returncode != 0, f"{room} must not be importable"


HEAVY = ("torch", "transformers", "docker", "ray", "wandb", "peft", "renderers")


def test_the_command_line_starts_without_heavy_parts() -> None:
    code = f"import sys, driftgym.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "[]"


def config_types() -> list[type]:
    import driftgym
    from driftgym.config import Config

    for module in pkgutil.walk_packages(driftgym.__path__, "driftgym."):
        importlib.import_module(module.name)
    found: list[type] = []
    pending: list[type] = [Config]
    while pending:
        below = [child for child in pending.pop().__subclasses__() if child not in found]
        found += [child for child in below if child.__module__.startswith("driftgym.")]
        pending += below
    return found


def leaf_fields(config_type: typing.Any) -> list[str]:
    return [name for name, info in config_type.model_fields.items() if not has_section(info.annotation)]


def has_section(annotation: typing.Any) -> bool:
    parts = typing.get_args(annotation) if not isinstance(annotation, type) else (annotation,)
    if isinstance(annotation, types.GenericAlias):
        parts = typing.get_args(annotation)
    return any(hasattr(part, "model_fields") for part in parts)


def test_there_are_at_most_120_config_fields() -> None:
    fields = [f"{config.__name__}.{name}" for config in config_types() for name in leaf_fields(config)]
    assert 0 < len(fields) <= 120, sorted(fields)
