"""Folders that are whole or not there: written under another name, sealed with a manifest of checksums, renamed last.

A checkpoint of a run is such a folder, named after its policy version; the learner's part is a folder within it,
sealed on its own::

    checkpoints/00000040/            with sealed_folder(checkpoints / "00000040") as partial:
        learner/                         await client.save(partial / "learner")
            weights.safetensors
            optimizer.pt
            state.json
            manifest.json
        state.json                       (partial / "state.json").write_text(...)
        manifest.json

A manifest lists every file of its folder and, of a sealed folder within it, the manifest alone. No torch here: the
loop looks for the newest complete checkpoint before it starts a learner.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgym.errors import TrainingError

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


@contextmanager
def sealed_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write into; on success it is sealed and becomes `folder`, on any error it is removed.

    `folder` does not exist yet, or is empty. What an earlier attempt left behind, killed midway, is removed.

    Raises:
        OSError: `folder` holds something, or cannot be written.
    """
    partial = folder.with_name(_PARTIAL + folder.name)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        seal(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def seal(folder: Path) -> None:
    """Writes the manifest of `folder`: the checksum of each file."""
    files = {str(path.relative_to(folder)): file_checksum(path) for path in _own_files(folder)}
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps({"files": files}, indent=1, sort_keys=True), encoding="utf-8")
    partial.rename(folder / MANIFEST)


def damage_of(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in a few words; None when every file is as it was when sealed."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): str(checksum) for name, checksum in files.items()}
    except OSError as error:
        return _unreadable(folder / MANIFEST, error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MANIFEST} is damaged"
    for name, checksum in expected.items():
        path = folder / name
        if damage := _damage_of_file(path, checksum):
            return damage
        if path.name == MANIFEST and (damage := damage_of(path.parent)):
            return damage
    return None


def _damage_of_file(path: Path, checksum: str) -> str | None:
    try:
        return None if file_checksum(path) == checksum else f"{path} is damaged"
    except OSError as error:
        return _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing"
    return f"{path} cannot be read ({error.strerror})"


def check_sealed(folder: Path) -> None:
    """Raises TrainingError when `folder` is not a complete sealed folder."""
    if damage := damage_of(folder):
        raise TrainingError(f"checkpoint {folder.name}: {damage}")


def newest_complete(folder: Path, *, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint in `folder` that is complete; None when there is none.

    Newest is the one with the highest number at the end of its name. Each one that is passed over is named through
    `say` in one line, with what is wrong with it.
    """
    numbered = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if not path.name.startswith(".") and (match := re.search(r"(\d+)$", path.name))
        if path.is_dir() or path.name.isdigit()
    ]
    for _, path in sorted(numbered, reverse=True):
        damage = damage_of(path)
        if damage is None:
            return path
        say(f"checkpoint {path.name} is passed over: {damage}")
    return None


def remove_partial(folder: Path) -> None:
    """Removes what writers that were killed midway left in `folder`; nobody is writing there now."""
    for leftover in folder.glob(_PARTIAL + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def file_checksum(path: Path) -> str:
    """`sha256:` and the digest of the file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _own_files(folder: Path) -> list[Path]:
    """The files that the manifest of `folder` lists: of a sealed folder within it, the manifest alone."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files += [path / MANIFEST] if (path / MANIFEST).is_file() else _own_files(path)
        elif path.name != MANIFEST:
            files.append(path)
    return files
