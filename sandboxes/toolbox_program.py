"""How the toolbox gets into a box: as one program text for a container, as an import for a local child."""

import binascii
import functools
import importlib.util
import json
import marshal
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = "driftgym.sandboxes"
_MODULES = (
    "toolbox_wire",
    "toolbox_system",
    "toolbox_files",
    "toolbox_tree",
    "toolbox_child",
    "toolbox_filter",
    "toolbox_io",
    "toolbox_processes",
    "toolbox",
)
_RELAY = "toolbox_relay"
_LOADER = """\
import binascii, marshal, sys, zlib
def unpack(text):
    return marshal.loads(zlib.decompress(binascii.a2b_base64(text)))
def load(magic, compiled, source):
    is_same = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == magic
    for name, code in unpack(compiled if is_same else source):
        module = sys.modules[name] = type(sys)(name)
        exec(code if is_same else compile(code, name, "exec"), module.__dict__)
    module.main()
"""


@functools.cache
def program_text(*, has_relay: bool = False) -> str:
    """The toolbox as one text for `python3 -c`: Linux takes at most 128 KiB in one argument.

    It holds the sources, and what they compile to for a Python of this one's version: to compile them takes a box
    longer than everything else that it does at its start.
    """
    folder = Path(__file__).parent
    modules = (_RELAY, *_MODULES) if has_relay else _MODULES
    sources = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text()) for name in modules]
    compiled = [(name, compile(source, name, "exec", dont_inherit=True, optimize=2)) for name, source in sources]
    return f"{_LOADER}load({importlib.util.MAGIC_NUMBER!r}, {_packed(compiled)!r}, {_packed(sources)!r})\n"


def _packed(modules: list[Any]) -> str:
    return binascii.b2a_base64(zlib.compress(marshal.dumps(modules, 2), 9), newline=False).decode()


def container_command(settings: Mapping[str, Any]) -> list[str]:
    """The argv that serves a box from within an image that has a Python 3."""
    text = program_text(has_relay=settings.get("egress_port") is not None)
    return ["python3", "-I", "-S", "-c", text, json.dumps(settings)]


def local_command(settings: Mapping[str, Any]) -> list[str]:
    """The argv that serves a box on this machine. Imported, so that the compiled files are used again."""
    import driftgym

    root = str(Path(driftgym.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); from driftgym.sandboxes.toolbox import main; main()"
    return [sys.executable, "-I", "-S", "-c", program, json.dumps(settings)]
