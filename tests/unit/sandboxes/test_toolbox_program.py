"""How the toolbox gets into a box."""

import ast
import json
import subprocess
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


def test_program_fits_in_one_argument() -> None:
    assert len(program.program_text().encode()) < 100_000


@pytest.mark.parametrize("command", [program.container_command, program.local_command])
def test_both_ways_in_serve_and_end_with_their_input(command: object, tmp_path: Path) -> None:
    assert callable(command)
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
    ended = subprocess.run(
        command(settings), input=HEADER.pack(len(ping), 0) + ping, capture_output=True, check=False, timeout=60
    )
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
