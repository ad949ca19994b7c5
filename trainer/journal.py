"""The journal: what was issued, what finished, and what was consumed at which step. `RUN/journal.sqlite` and the
trajectories beside it.

One process writes it, each change in one transaction, so that after `kill -9` it stands between two changes, and so
it does after a power failure, with all from before the last `flush`. A group's trajectories are written before the row
that calls the group finished. `step` is the policy version that the step made. SQLite in WAL mode: readers (a web page,
a second shell) never hold up the run.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from driftgym.errors import TrainingError
from driftgym.metrics import plain_row
from driftgym.trainer.counts import Counts, read_counts, read_rewards, read_rewards_by_group
from driftgym.trainer.durable import flush_files
from driftgym.trainer.records import read_group, write_group
from driftgym.trainer.staleness import LagHistogram, newest_version, oldest_version
from driftgym.trainer.tally import Tally
from driftgym.types import Trajectory, TrajectoryGroup

_EVENT_KEY = "event:"  # in `meta`, before the name of what is counted
_COUNT_FLUSH = "INSERT INTO meta VALUES ('flushes', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1"
_SETTLED_KEY = "settled:"  # likewise, of what is the same in every life
GroupState = Literal["issued", "finished", "failed", "trained", "dropped", "filtered"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, task_index INTEGER NOT NULL UNIQUE, group_size INTEGER NOT NULL,
    min_policy_version INTEGER NOT NULL, incarnation INTEGER NOT NULL, state TEXT NOT NULL,
    oldest_version INTEGER, newest_version INTEGER, step INTEGER, error TEXT,
    num_ended INTEGER NOT NULL DEFAULT 0, num_scored INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state);
CREATE TABLE IF NOT EXISTS episodes (
    group_id TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL, reward REAL,
    num_tokens INTEGER NOT NULL, num_turns INTEGER NOT NULL, started_at REAL NOT NULL, ended_at REAL NOT NULL,
    error TEXT, events TEXT NOT NULL, PRIMARY KEY (group_id, member)
);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, row TEXT NOT NULL, lag_counts TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """What the journal knows of a group.

    >>> GroupRow(group_id="g000004", task_index=4, min_policy_version=2, oldest_version=None).task_index
    4
    """

    group_id: str
    """Which group."""
    task_index: int
    """Its place in the order of issue, and the index of its task."""
    min_policy_version: int
    """The lowest version that its requests may be answered with."""
    oldest_version: int | None
    """The oldest version that wrote one of its tokens; None before it finished, or when it has none."""


class Journal:
    """One run's journal. Not for several threads; close it at the end.

    `open` makes it or takes it up; each life of the run calls `begin_life` once.
    """

    def __init__(self, connection: sqlite3.Connection, trajectories: Path) -> None:
        self._db = connection
        self._trajectories = trajectories
        self._incarnation = 0
        self._unflushed: list[Path] = []
        self._tally: Tally | None = None  # made when first asked for, and anew after a change of the past

    @classmethod
    def open(cls, run_dir: Path) -> "Journal":
        """The journal of the run in `run_dir`. Raises TrainingError when it is not a journal."""
        trajectories, path = run_dir / "trajectories", run_dir / "journal.sqlite"
        try:
            trajectories.mkdir(parents=True, exist_ok=True)
            return cls(_connect(path), trajectories)
        except OSError as error:
            raise TrainingError(f"{trajectories}: cannot be written ({error.strerror})") from None
        except sqlite3.Error as error:
            raise TrainingError(f"{path}: cannot be opened as a journal ({error})") from None

    @property
    def incarnation(self) -> int:
        """The life of the run that writes now, from 1; 0 before `begin_life`."""
        return self._incarnation

    def begin_life(self) -> int:
        """Counts one more life of the run and returns its number, which no later life gets, whatever happens."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO meta VALUES ('incarnation', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )
        ((self._incarnation,),) = self._db.execute("SELECT value FROM meta WHERE key = 'incarnation'")
        self.flush()
        return self._incarnation

    def issue(self, *, group_id: str, task_index: int, group_size: int, min_policy_version: int) -> None:
        """A group starts; one that was issued before and did not finish starts again, whole."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO groups (group_id, task_index, group_size, min_policy_version, incarnation, state)"
                " VALUES (?, ?, ?, ?, ?, 'issued') ON CONFLICT (group_id) DO UPDATE SET"
                " group_size = excluded.group_size, min_policy_version = excluded.min_policy_version,"
                " incarnation = excluded.incarnation",
                (group_id, task_index, group_size, min_policy_version, self._incarnation),
            )

    def write_trajectories(self, group: TrajectoryGroup) -> None:
        """Writes the group's trajectories; safe in another thread. `finish` comes after."""
        write_group(self._path(group.group_id), group)
        self._unflushed.append(self._path(group.group_id))

    def flush_trajectories(self) -> None:
        """Makes those written so far safe against a power failure; safe in another thread. Raises OSError."""
        paths = self._unflushed[:]
        flush_files(self._trajectories, paths)
        del self._unflushed[: len(paths)]  # and no others, which may have been added meanwhile

    def finish(self, group: TrajectoryGroup, *, failed: bool, step: int | None = None) -> None:
        """A group's episodes have ended. A failed one (no member is scored) is consumed with that, no later than by
        `step`."""
        errors = [t.error for t in group.trajectories if t.error]
        tally = self.tally
        with self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ?, oldest_version = ?, newest_version = ?, step = ?, error = ?,"
                " num_ended = ?, num_scored = ? WHERE group_id = ?",
                (
                    "failed" if failed else "finished",
                    oldest_version(group),
                    newest_version(group),
                    step if failed else None,
                    _sql_text(errors[0]) if errors else None,
                    len(group.trajectories),
                    sum(t.status.is_scored for t in group.trajectories),
                    group.group_id,
                ),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_episode_values(t) for t in group.trajectories],
            )
        for trajectory in group.trajectories:
            tally.add(status=trajectory.status, events=trajectory.events, num_retries=trajectory.attempt)

    def count_event(self, name: str) -> None:
        """Something happened to the run that no episode tells of. It stays counted, whatever is rolled back."""
        tally = self.tally
        with self._transaction():
            self._db.execute(
                "INSERT INTO meta VALUES (?, 1) ON CONFLICT (key) DO UPDATE SET value = value + 1", (_EVENT_KEY + name,)
            )
        tally.count(name)

    def consume(
        self,
        *,
        step: int,
        trained: Sequence[str],
        dropped: Sequence[str],
        filtered: Sequence[str] = (),
        row: Mapping[str, Any],
        lags: LagHistogram,
    ) -> None:
        """A step was done: `trained` groups went into it, `dropped` ones were too old, `filtered` ones told
        nothing; `row` are its metrics.

        Raises:
            TrainingError: one of them is not finished, or was consumed before; nothing is changed.
        """
        with self._transaction():
            self._consume(trained, "trained", step=step)
            self._consume(dropped, "dropped", step=step)
            self._consume(filtered, "filtered", step=step)
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?)",
                (step, self._incarnation, json.dumps(plain_row(row)), json.dumps(lags.counts)),
            )

    def _consume(self, group_ids: Iterable[str], state: GroupState, *, step: int) -> None:
        sql = "UPDATE groups SET state = ?, step = ? WHERE group_id = ? AND state = 'finished'"
        for group_id in group_ids:
            if self._db.execute(sql, (state, step, group_id)).rowcount != 1:
                raise TrainingError(f"step {step} consumed {group_id}, which is not finished and unconsumed")

    def roll_back(self, step: int) -> None:
        """Back to the moment after `step`: what later steps consumed is unconsumed, and groups that failed since, or
        that hold tokens of versions above `step`, which are lost, are unfinished again."""
        with self._transaction():
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._db.execute(
                "UPDATE groups SET state = 'finished', step = NULL"
                " WHERE state IN ('trained', 'dropped', 'filtered') AND step > ?",
                (step,),
            )
            lost = self._db.execute(
                "SELECT group_id FROM groups"
                " WHERE state = 'finished' AND newest_version > ? OR state = 'failed' AND step > ?",
                (step, step),
            ).fetchall()
            self._unfinish(group_id for (group_id,) in lost)

    def unfinish(self, group_ids: Iterable[str]) -> None:
        """These finished groups are to be played again, whole."""
        with self._transaction():
            self._unfinish(group_ids)

    def groups(self, state: GroupState) -> tuple[GroupRow, ...]:
        """The groups in `state`, in the order of issue."""
        rows = self._db.execute(
            "SELECT group_id, task_index, min_policy_version, oldest_version FROM groups"
            " WHERE state = ? ORDER BY task_index",
            (state,),
        )
        return tuple(GroupRow(group_id=g, task_index=i, min_policy_version=m, oldest_version=o) for g, i, m, o in rows)

    def load_group(self, group_id: str) -> TrajectoryGroup:
        """The trajectories of a finished group. Raises TrainingError when they are damaged."""
        return read_group(self._path(group_id))

    def next_task_index(self) -> int:
        """The index of the first task that was never issued."""
        ((last,),) = self._db.execute("SELECT MAX(task_index) FROM groups")
        return 0 if last is None else int(last) + 1

    def last_step(self) -> int:
        """The last step that was done; 0 before the first."""
        ((last,),) = self._db.execute("SELECT MAX(step) FROM steps")
        return int(last or 0)

    def step_rows(self) -> list[dict[str, Any]]:
        """The metrics of every step that stands, in order."""
        return [json.loads(row) for (row,) in self._db.execute("SELECT row FROM steps ORDER BY step")]

    def lags(self) -> LagHistogram:
        """The lags of all trained tokens."""
        total = LagHistogram()
        for (counts,) in self._db.execute("SELECT lag_counts FROM steps"):
            total += LagHistogram(counts=tuple(json.loads(counts)))
        return total

    def counts(self) -> Counts:
        """How many episodes started, finished, were trained; and the groups that were not."""
        return read_counts(self._db)

    def rewards_by_group(self) -> list[tuple[int, list[float]]]:
        """For each group with a scored member, in the order of issue: the index of its task, and their grades."""
        return read_rewards_by_group(self._db)

    def rewards(self) -> list[float]:
        """The grades of the scored episodes, in the order in which their tasks were taken."""
        return read_rewards(self._db)

    @property
    def tally(self) -> Tally:
        """What went wrong and what happened, over every episode that ended and in every life of the run."""
        if self._tally is None:
            self._tally = Tally()
            for status, events, attempt in self._db.execute("SELECT status, events, attempt FROM episodes"):
                self._tally.add(status=status, events=json.loads(events), num_retries=attempt)
            for key, times in self._db.execute("SELECT key, value FROM meta"):
                if key.startswith(_EVENT_KEY):
                    self._tally.count(key.removeprefix(_EVENT_KEY), times)
        return self._tally

    def flush(self) -> None:
        """Makes all that was recorded safe against a power failure, trajectories first. Raises OSError for these."""
        self.flush_trajectories()
        self._db.execute("PRAGMA synchronous=FULL")  # whose commits wait until the log is on the disk
        try:
            with self._transaction():
                self._db.execute(_COUNT_FLUSH)
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        self._db.close()

    def _path(self, group_id: str) -> Path:
        return self._trajectories / f"{group_id}.json.gz"

    def _unfinish(self, group_ids: Iterable[str]) -> None:
        self._tally = None
        for group_id in group_ids:
            self._db.execute("DELETE FROM episodes WHERE group_id = ?", (group_id,))
            self._db.execute(
                "UPDATE groups SET state = 'issued', oldest_version = NULL, newest_version = NULL, error = NULL,"
                " step = NULL, num_ended = 0, num_scored = 0 WHERE group_id = ?",
                (group_id,),
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise TrainingError(f"the journal cannot be written: {error}") from None
            raise


def _connect(path: Path) -> sqlite3.Connection:
    """A connection to a journal, which is made where there is none. Raises sqlite3.Error when it is damaged."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(_SCHEMA)
        ((verdict,),) = connection.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
    except BaseException:
        connection.close()
        raise
    return connection


def leave_out(journal: Journal, groups: Iterable[TrajectoryGroup], *, step: int, figures: Mapping[str, Any]) -> None:
    """After `step`, the last one, these groups were too old as well; its row takes up `figures`, which count them.

    Raises:
        TrainingError: one of them is not finished, or was consumed before; nothing is changed.
    """
    db = journal._db
    with journal._transaction():
        journal._consume((group.group_id for group in groups), "dropped", step=step)
        for (row,) in db.execute("SELECT row FROM steps WHERE step = ?", (step,)).fetchall():
            text = json.dumps(json.loads(row) | plain_row(figures))
            db.execute("UPDATE steps SET row = ? WHERE step = ?", (text, step))


def settled(journal: Journal, name: str, value: int) -> int:
    """What `name` was in the first life of the run, where it must not change; settled as `value` if by none yet."""
    key, db = _SETTLED_KEY + name, journal._db
    with journal._transaction():
        db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (key, value))
        ((kept,),) = db.execute("SELECT value FROM meta WHERE key = ?", (key,))
    return int(kept)


def _episode_values(trajectory: Trajectory) -> tuple[Any, ...]:
    return (
        trajectory.group_id,
        trajectory.member,
        trajectory.attempt,
        trajectory.status.value,
        trajectory.reward,
        trajectory.num_sampled_tokens,
        trajectory.num_turns,
        trajectory.started_at,
        trajectory.ended_at,
        _sql_text(trajectory.error),
        json.dumps(dict(trajectory.events)),
    )


def _sql_text(text: str | None) -> str | None:
    """`text` with lone surrogates, which SQLite cannot hold, written as escapes: errors quote what programs print."""
    return text if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
