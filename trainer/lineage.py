"""Which life of a run stands: checkpoints, and going on from the newest complete one.

A checkpoint is one folder, published by one rename (`checkpoint.sealed_folder`): the learner's part and the loop's
`state.json`, of one moment between two steps. Going on from it rolls everything else back to that moment.
"""

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from driftgym.errors import ConfigError, TrainingError
from driftgym.metrics import add_missing_rows, split_lost_rows
from driftgym.trainer.checkpoint import newest_complete, number_in_name, remove_partial, sealed_folder
from driftgym.trainer.durable import flush_to_disk
from driftgym.trainer.journal import GroupRow, Journal
from driftgym.trainer.staleness import LagRule, PendingGroup, oldest_version
from driftgym.trainer.training_client import TrainingClient
from driftgym.types import TrajectoryGroup

_KEPT_CHECKPOINTS = 2  # the newest may turn out to be damaged
_LOST = ".lost-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredGroup:
    """A group that an earlier life finished and this one will train.

    >>> RestoredGroup.__slots__
    ('row', 'group')
    """

    row: GroupRow
    """What the journal says of it."""
    group: TrajectoryGroup
    """Its trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a life of a run begins.

    >>> Lineage(checkpoint=None, policy_version=0, restored=(), again=()).policy_version
    0
    """

    checkpoint: Path | None
    """The checkpoint that it goes on from; None at the very beginning."""
    policy_version: int
    """That of the checkpoint."""
    restored: tuple[RestoredGroup, ...]
    """Finished and unconsumed."""
    again: tuple[GroupRow, ...]
    """Issued and not finished: to be played again, whole."""


def learner_part(checkpoint: Path) -> Path:
    """Where the learner's part of a checkpoint lies."""
    return checkpoint / "learner"


async def write_checkpoint(run_dir: Path, client: TrainingClient, journal: Journal, *, policy_version: int) -> Path:
    """Writes the checkpoint of this moment, between two steps; older ones beyond the last two are removed.

    Raises:
        TrainingError: it cannot be written; the earlier ones stand.
    """
    checkpoints = run_dir / "checkpoints"
    folder = checkpoints / _folder_name(policy_version)
    try:
        # A checkpoint never outlives the journal that leads up to it, nor that the trajectories that it speaks of: the
        # many before, in a thread, and with the journal the few that came meanwhile.
        await asyncio.to_thread(_flush_records, run_dir, journal)
        journal.flush()
        shutil.rmtree(folder, ignore_errors=True)  # only a damaged one can stand in the way
        with sealed_folder(folder) as partial:
            await client.save(learner_part(partial))
            state = {"policy_version": policy_version, "incarnation": journal.incarnation}
            (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"{folder}: the checkpoint cannot be written ({error.strerror})") from None
    numbered = sorted((path for path in checkpoints.iterdir() if path.name.isdecimal()), key=lambda p: int(p.name))
    for old in numbered[:-_KEPT_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _flush_records(run_dir: Path, journal: Journal) -> None:
    """All that a run writes beside journal and checkpoints, and the names of these. Raises OSError."""
    journal.flush_trajectories()
    metrics = run_dir / "metrics.jsonl"
    flush_to_disk(*([metrics] if metrics.exists() else []), run_dir, run_dir.parent)


def take_up(run_dir: Path, journal: Journal, rule: LagRule, *, say: Callable[[str], None]) -> Lineage:
    """Rolls the run in `run_dir` back to its newest complete checkpoint, or to its beginning where there is none.

    Checkpoints of lost steps are set aside, metric rows of lost steps move to `metrics.lost.jsonl`, and what a killed
    writer left of a checkpoint is removed.

    Raises:
        ConfigError: there are checkpoints, and none is complete: nothing is changed; or the folder cannot be written.
        TrainingError: journal and checkpoint do not belong together.
    """
    try:
        return _take_up(run_dir, journal, rule, say=say)
    except OSError as error:
        raise ConfigError(f"{error.filename or run_dir}: cannot be taken up ({error.strerror})") from None


def _take_up(run_dir: Path, journal: Journal, rule: LagRule, *, say: Callable[[str], None]) -> Lineage:
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    remove_partial(checkpoints)
    checkpoint = _newest_checkpoint(checkpoints, say=say)
    version = 0 if checkpoint is None else _version_of(checkpoint)
    if journal.last_step() < version:
        raise TrainingError(f"{run_dir}: the journal ends at step {journal.last_step()}, before checkpoint {version}")
    for path in checkpoints.iterdir():
        is_taken_up = checkpoint is not None and path.resolve() == checkpoint.resolve()
        if path.name.isdecimal() and int(path.name) >= version and not is_taken_up:
            _set_aside(path)
    if checkpoint is not None and checkpoint.name.isdecimal():
        checkpoint = checkpoint.rename(checkpoints / _folder_name(version))  # a later one may be called as it was
    num_lost = split_lost_rows(run_dir / "metrics.jsonl", run_dir / "metrics.lost.jsonl", last_step=version)
    journal.roll_back(version)
    num_missing = add_missing_rows(run_dir / "metrics.jsonl", journal.step_rows())
    if num_missing:
        say(f"{num_missing} rows were missing in metrics.jsonl; they are there again, from the journal")
    if num_lost:
        say(f"{num_lost} steps after step {version} were lost; their metrics are in metrics.lost.jsonl")
    restored = _restore(journal, rule, policy_version=version, say=say)
    return Lineage(checkpoint=checkpoint, policy_version=version, restored=restored, again=journal.groups("issued"))


def lock_run(run_dir: Path) -> int:
    """Takes the run for this process until it ends. Returns the lock's file descriptor.

    Raises:
        ConfigError: another process has it, or the folder cannot be written.
    """
    try:
        lock = os.open(run_dir / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{run_dir / 'run.lock'}: cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"{run_dir}: another process is running this run; wait for it or stop it") from None
    return lock


def _folder_name(policy_version: int) -> str:
    return f"{policy_version:08d}"


def _newest_checkpoint(checkpoints: Path, *, say: Callable[[str], None]) -> Path | None:
    """The one to go on from. Raises ConfigError when all are damaged: to begin anew would throw the run away."""
    passed_over: list[str] = []
    checkpoint = newest_complete(checkpoints, say=passed_over.append, number_of=_said_version)
    if checkpoint is None and passed_over:
        raise ConfigError(
            f"{checkpoints}: no checkpoint is complete: {'; '.join(passed_over)}. Put one back from a copy, or remove "
            "them all to play the run again from its beginning"
        )
    for line in passed_over:
        say(line)
    return checkpoint


def _said_version(checkpoint: Path) -> int | None:
    """The version that a checkpoint says it is of, whatever the number in its name; that one where it does not say."""
    number = number_in_name(checkpoint)
    try:
        return None if number is None else _version_of(checkpoint)
    except TrainingError:
        return number


def _version_of(checkpoint: Path) -> int:
    try:
        return int(json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["policy_version"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrainingError(f"{checkpoint}/state.json: not the state of a run") from None


def _set_aside(path: Path) -> None:
    """A checkpoint of a lost life keeps its content under a name that is never taken up again."""
    aside = path.with_name(_LOST + path.name)
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
    path.rename(aside)


def _checked(group: TrajectoryGroup, row: GroupRow) -> TrajectoryGroup:
    """`group`, if it is the one that the journal tells of. Raises TrainingError."""
    if (group.group_id, oldest_version(group)) != (row.group_id, row.oldest_version):
        raise TrainingError(f"the trajectories of {row.group_id} are not those that the journal tells of")
    return group


def _restore(
    journal: Journal, rule: LagRule, *, policy_version: int, say: Callable[[str], None]
) -> tuple[RestoredGroup, ...]:
    """The finished groups that can still be trained in time; the others become unfinished."""
    rows = {row.group_id: row for row in journal.groups("finished")}
    groups: dict[str, TrajectoryGroup] = {}
    for group_id, row in rows.items():
        try:
            groups[group_id] = _checked(journal.load_group(group_id), row)
        except TrainingError as error:
            say(f"{error}; the group is played again")
    pending = [
        PendingGroup(
            group_id=row.group_id,
            order=row.task_index,
            due=rule.due(row.min_policy_version),
            is_finished=True,
            oldest_version=row.oldest_version,
        )
        for row in rows.values()
        if row.group_id in groups
    ]
    kept = rule.feasible_part(pending, now=policy_version)
    journal.unfinish(set(rows) - set(kept))
    return tuple(RestoredGroup(row=rows[group_id], group=groups[group_id]) for group_id in kept)
