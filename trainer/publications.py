"""Folders of published weights: complete or not there, each with a record of what it is; those out of use are removed.

A publication is a folder `INCARNATION-VERSION` below the run's `weights`. Its `publication.json` says what the
`WeightUpdate` says that generators are given. No torch here.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from driftgym.trainer.durable import flush_to_disk
from driftgym.types import WeightUpdate

RECORD_FILE = "publication.json"
_NAME = re.compile(r"([0-9]+)-([0-9]+)")
_PARTIAL = ".partial-"
_REMOVED = ".removed-"
_NUM_KEPT = 2


def publication_folder(root: Path, *, incarnation: int, policy_version: int) -> Path:
    """Where that publication stands."""
    return root / f"{incarnation}-{policy_version}"


@contextmanager
def new_publication(target: Path, *, is_durable: bool) -> Iterator[Path]:
    """Yields a folder to write into, which becomes `target` at the end of the block; on any error nothing does.

    Everything is written under another name and renamed last, so that a reader finds `target` complete or not at all,
    also when the writer is killed. One that stands there already makes way. What killed writers left is removed.

    Args:
        target: the publication's folder.
        is_durable: the machine may stop as well: all is on the disk before the name is.
    """
    root = target.parent
    _remove_leftovers(root)
    partial = root / (_PARTIAL + target.name)
    partial.mkdir(parents=True)
    yield partial
    if is_durable:
        flush_to_disk(*partial.iterdir(), partial)
    if target.exists():
        target.rename(root / (_REMOVED + target.name))
    partial.rename(target)
    if is_durable:
        flush_to_disk(root)
    _remove_leftovers(root)


def write_record(folder: Path, update: WeightUpdate) -> None:
    """Says in `folder` what it is."""
    record = {
        "policy_version": update.policy_version,
        "incarnation": update.incarnation,
        "kind": update.kind,
        "base_policy_version": update.base_policy_version,
        "checksum": update.checksum,
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_publication(folder: Path) -> WeightUpdate:
    """The publication in `folder`, as generators are told of it.

    Raises:
        OSError, ValueError: there is none.
    """
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    try:
        update = WeightUpdate(location=str(folder), **record)
    except TypeError as error:
        raise ValueError(f"{folder / RECORD_FILE}: {error}") from None
    if not isinstance(update.base_policy_version, int | None):
        raise ValueError(f"{folder / RECORD_FILE}: base_policy_version is no number")
    return update


def is_published(root: Path, *, policy_version: int) -> bool:
    """True when a whole model of that version stands below `root`, whichever life published it."""
    versions = _publications(root) if root.is_dir() else {}
    updates = [read_or_none(path) for (_, version), path in versions.items() if version == policy_version]
    return any(update is not None and update.kind == "full" for update in updates)


def remove_unused(root: Path) -> None:
    """Removes all publications but the two newest and those that these build on.

    Generators are brought to one publication before the next is made. The one before is kept for a generator that is
    being started with it.
    """
    found = _publications(root)
    newest = sorted(found)[-_NUM_KEPT:]
    kept = {needed for key in newest for needed in _with_bases(key, found)}
    for key in found.keys() - kept:
        # Renamed first: a folder of that name is complete, also when the removal is cut short.
        found[key].rename(root / (_REMOVED + found[key].name))
    _remove_leftovers(root)


def read_or_none(folder: Path) -> WeightUpdate | None:
    """As `read_publication`; None when there is none."""
    try:
        return read_publication(folder)
    except (OSError, ValueError):
        return None


def _with_bases(key: tuple[int, int], found: Mapping[tuple[int, int], Path]) -> Iterator[tuple[int, int]]:
    """The publication, and those that it builds on one after the other."""
    current: tuple[int, int] | None = key
    while current is not None and current in found:
        yield current
        update = read_or_none(found[current])
        base = update.base_policy_version if update is not None else None
        # Below itself alone: a record that says otherwise would lead round and round.
        current = (current[0], base) if base is not None and base < current[1] else None


def _publications(root: Path) -> dict[tuple[int, int], Path]:
    """By incarnation and version."""
    named = ((path, _NAME.fullmatch(path.name)) for path in root.iterdir() if path.is_dir())
    return {(int(match[1]), int(match[2])): path for path, match in named if match}


def _remove_leftovers(root: Path) -> None:
    for pattern in (_PARTIAL, _REMOVED):
        for leftover in root.glob(pattern + "*"):
            shutil.rmtree(leftover)
