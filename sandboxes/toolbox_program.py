"""How the toolbox gets into a box: over its standard input into a container, as an import for a local child."""

import functools
import importlib.util
import json
import marshal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGE = "driftgym.sandboxes"
_MODULES = (
    "toolbox_wire",
    "toolbox_system",
    "toolbox_files",
    "toolbox_tree",
    "toolbox_rights",
    "toolbox_child",
    "toolbox_filter",
    "toolbox_io",
    "toolbox_processes",
    "toolbox",
)
_RELAY = "toolbox_relay"
_LOADER = """\
import marshal, os, sys
def read(size):
    data = bytearray()
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit(0)
        data += more
    return data
compiled, source = map(read, {sizes})
is_same = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == {magic}
for name, code in marshal.loads(compiled if is_same else source):
    module = sys.modules[name] = type(sys)(name)
    exec(code if is_same else compile(code, name, "exec"), module.__dict__)
del compiled, source, code
module.main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCommand:
    """A program that reads the rest of itself from its standard input, before it takes requests from there.

    >>> StreamedCommand(argv=("python3", "-c", "..."), program=b"print(1)").program
    b'print(1)'
    """

    argv: tuple[str, ...]
    """What is run."""
    program: bytes
    """What is written to its standard input first."""


def container_command(settings: Mapping[str, Any]) -> StreamedCommand:
    """What serves a box from within an image that has a Python 3.

    The program holds the sources, and what they compile to for a Python of this one's version: to compile them takes a
    box longer than everything else that it does at its start.

    An engine copies the argv of a container many times over in its life: as one argument of 90 KiB, the program costs
    it a quarter of the time that it needs for a container.
    """
    compiled, sources = _program_parts(has_relay=settings.get("egress_port") is not None)
    loader = _LOADER.format(magic=importlib.util.MAGIC_NUMBER, sizes=[len(compiled), len(sources)])
    argv = ("python3", "-I", "-S", "-c", loader, json.dumps(settings))
    return StreamedCommand(argv=argv, program=compiled + sources)


def local_command(settings: Mapping[str, Any]) -> list[str]:
    """The argv that serves a box on this machine. Imported, so that the compiled files are used again."""
    import driftgym

    root = str(Path(driftgym.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); from driftgym.sandboxes.toolbox import main; main()"
    return [sys.executable, "-I", "-S", "-c", program, json.dumps(settings)]


@functools.cache
def _program_parts(*, has_relay: bool) -> tuple[bytes, bytes]:
    sources = _sources(has_relay=has_relay)
    # What is compiled is read by this version of Python alone; sources by any, whose oldest form is the second.
    return marshal.dumps(_compiled(sources)), marshal.dumps(sources, 2)


def _sources(*, has_relay: bool) -> list[tuple[str, str]]:
    folder = Path(__file__).parent
    modules = (_RELAY, *_MODULES) if has_relay else _MODULES
    return [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text()) for name in modules]


def _compiled(sources: list[tuple[str, str]]) -> list[tuple[str, CodeType]]:
    return [(name, compile(source, name, "exec", dont_inherit=True, optimize=2)) for name, source in sources]
