"""How the toolbox gets into a box."""

import ast
import json
import subprocess
from collections.abc import Callable
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

import driftgym.sandboxes.toolbox_program as program
from driftgym.sandboxes.toolbox_io import HEADER
from driftgym.sandboxes.toolbox_sandbox import decode_output

FILES = (
    "toolbox.py",
    "toolbox_child.py",
    "toolbox_files.py",
    "toolbox_filter.py",
    "toolbox_io.py",
    "toolbox_processes.py",
    "toolbox_relay.py",
    "toolbox_rights.py",
    "toolbox_system.py",
    "toolbox_tree.py",
    "toolbox_wire.py",
)


@pytest.mark.parametrize("name", FILES)
def test_toolbox_is_python_3_8_with_its_standard_library(name: str) -> None:
    source = (Path(program.__file__).parent / name).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    allowed = {
        "_ctypes",
        "ctypes",
        "fcntl",
        "gc",
        "os",
        "resource",
        "select",
        "socket",
        "stat",
        "struct",
        "sys",
        "tarfile",
        "time",
    }
    allowed |= {"_json", "_signal", "json", "signal", "collections.abc", "typing", "__future__"} | {
        "driftgym.sandboxes." + file[:-3] for file in FILES
    }
    assert imported <= allowed


def by_import(settings: dict[str, object]) -> program.StreamedCommand:
    return program.StreamedCommand(argv=tuple(program.local_command(settings)), program=b"")


def by_source(settings: dict[str, object]) -> program.StreamedCommand:
    """As an image does whose Python is of another version."""
    command = program.container_command(settings)
    argv = [argument.replace(repr(MAGIC_NUMBER), "b'another'") for argument in command.argv]
    assert argv != list(command.argv)
    return program.StreamedCommand(argv=tuple(argv), program=command.program)


def test_argv_of_a_container_is_short() -> None:
    assert sum(map(len, program.container_command({"egress_port": 1}).argv)) < 2000


def test_container_whose_input_ends_early_just_ends() -> None:
    command = program.container_command({})
    ended = subprocess.run(command.argv, input=command.program[:1000], capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.parametrize("command_of", [program.container_command, by_source, by_import])
def test_every_way_in_serves_and_ends_with_its_input(
    command_of: Callable[[dict[str, object]], program.StreamedCommand], tmp_path: Path
) -> None:
    for name in ("work", "tmp"):
        (tmp_path / name).mkdir()
    settings = {
        "uid": None,
        "work_dir": str(tmp_path / "work"),
        "tmp_dir": str(tmp_path / "tmp"),
        "limits": {},
        "is_local": True,
    }
    ping = json.dumps({"id": 7, "op": "ping"}).encode()
    command = command_of(settings)
    requests = command.program + HEADER.pack(len(ping), 0) + ping
    ended = subprocess.run(command.argv, input=requests, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert b'"event": "ready"' in ended.stdout
    assert ended.stdout.endswith(b'{"id": 7}')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "is_cut", "text"),
    [
        (b"", False, ""),
        ("é".encode()[:1], True, ""),
        ("é".encode()[:1], False, "\ufffd"),
        ("a€".encode()[:3], True, "a"),
        (b"\xff\xff", True, "\ufffd\ufffd"),
        ("é".encode(), True, "é"),
    ],
)
def test_output_is_decoded_without_splitting_characters(data: bytes, is_cut: bool, text: str) -> None:
    assert decode_output(data, is_cut=is_cut) == text
