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

A manifest lists every file of its folder and, of a sealed folder within it, the manifest alone. Whole holds for a
failure of the machine too: files, manifest and folders are on the disk before the name is, and the name is when the
writer goes on. No torch here: the loop looks for the newest complete checkpoint before it starts a learner.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgym.errors import TrainingError
from driftgym.trainer.durable import flush_to_disk

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


@contextmanager
def sealed_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write into; on success it is sealed and becomes `folder`, on any error it is removed.

    `folder` does not exist yet, or is empty. What an earlier attempt left behind, killed midway, is removed. At the end
    all of it is on the disk.

    Raises:
        OSError: `folder` holds something, or cannot be written.
    """
    partial = folder.with_name(_PARTIAL + folder.name)
    made = [parent for parent in folder.parents if not parent.exists()]
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        seal(partial)
        partial.rename(folder)
        flush_to_disk(folder.parent, *(parent.parent for parent in made))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def seal(folder: Path) -> None:
    """Writes the manifest of `folder`: the checksum of each file. All of it is on the disk afterwards."""
    own_files = _own_files(folder)
    files = {str(path.relative_to(folder)): file_checksum(path) for path in own_files}
    flush_to_disk(*own_files, *_folders_within(folder, own_files))
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps({"files": files}, indent=1, sort_keys=True), encoding="utf-8")
    flush_to_disk(partial)
    partial.rename(folder / MANIFEST)
    flush_to_disk(folder)


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


def number_in_name(folder: Path) -> int | None:
    """The number at the end of its name; None where there is none, or a file that is not named by a number alone."""
    match = re.search(r"(\d+)$", folder.name)
    return int(match.group(1)) if match and (folder.is_dir() or folder.name.isdecimal()) else None


def newest_complete(
    folder: Path, *, say: Callable[[str], None] = print, number_of: Callable[[Path], int | None] = number_in_name
) -> Path | None:
    """The newest checkpoint in `folder` that is complete; None when there is none.

    Args:
        folder: what it holds is looked at, but for names that begin with a dot.
        say: told of each one that is passed over, in one line, with what is wrong with it.
        number_of: the newest has the highest number; None for what is no checkpoint.
    """
    found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if not path.name.startswith(".")]
    numbered = [(number, path.name.isdecimal(), path) for path in found if (number := number_of(path)) is not None]
    for *_, path in sorted(numbered, reverse=True):  # of a checkpoint and its copy, the one that has its plain name
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


def _folders_within(folder: Path, files: Iterable[Path]) -> list[Path]:
    """The folders between `folder` and `files` below it."""
    return sorted({parent for path in files for parent in path.parents if folder in parent.parents})


def _own_files(folder: Path) -> list[Path]:
    """The files that the manifest of `folder` lists: of a sealed folder within it, the manifest alone."""
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files += [path / MANIFEST] if (path / MANIFEST).is_file() else _own_files(path)
        elif path.name != MANIFEST:
            files.append(path)
    return files
