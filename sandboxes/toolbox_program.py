"""How the toolbox gets into a box: as one program text for a container, as an import for a local child."""

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = "driftgym.sandboxes"
_MODULES = ("toolbox_system", "toolbox_io", "toolbox")
_LOADER = """\
import sys
def load(name, source):
    module = sys.modules[name] = type(sys)(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module
"""


@functools.cache
def program_text() -> str:
    """The toolbox as one text for `python3 -c`: Linux takes at most 128 KiB in one argument."""
    folder = Path(__file__).parent
    loads = [f"load({_PACKAGE + '.' + name!r}, {(folder / f'{name}.py').read_text()!r})" for name in _MODULES]
    return _LOADER + "\n".join(loads) + ".main()\n"


def container_command(settings: Mapping[str, Any]) -> list[str]:
    """The argv that serves a box from within an image that has a Python 3."""
    return ["python3", "-I", "-S", "-c", program_text(), json.dumps(settings)]


def local_command(settings: Mapping[str, Any]) -> list[str]:
    """The argv that serves a box on this machine. Imported, so that the compiled files are used again."""
    import driftgym

    root = str(Path(driftgym.__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); from driftgym.sandboxes.toolbox import main; main()"
    return [sys.executable, "-I", "-S", "-c", program, json.dumps(settings)]
