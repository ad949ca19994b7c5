"""A `driftgym train` that is killed and resumed, seen from outside: its processes, its files, its exit codes.

What to kill and when is a `Moment`: a target, and something to wait for, which is seen by watching the run's folder.
This process adopts what a killed run leaves behind (it is a subreaper), so that nothing slips away unseen.
"""

import ctypes
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Target = Literal["trainer", "generator", "learner", "everything"]
Phase = Literal["start", "any", "checkpoint", "weights", "journal", "close", "end"]

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/quickstart.yaml"
MODULES = {"learner": "driftgym.trainer.learner", "generator": "driftgym.agents.generators.embedded.server"}
SPREAD_S: Mapping[Phase, float] = {
    "start": 1.0,  # times the shortest that a start has taken
    "any": 2.0,
    "checkpoint": 0.03,
    "weights": 0.02,
    "journal": 0.001,
    "close": 1.0,
    "end": 1.0,
}
"""The kill comes so many seconds, at most, after what is waited for."""
_EXITS: Mapping[Target, frozenset[int]] = {
    "trainer": frozenset({-signal.SIGKILL}),
    "everything": frozenset({-signal.SIGKILL}),
    "learner": frozenset({1, 130}),  # failed, or was closing as it had been asked to
    "generator": frozenset({0, 1, 130}),
}
_POLL_S = 0.0005
_TIMEOUT_S = 300.0
_GONE_TIMEOUT_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When who is killed."""

    target: Target
    phase: Phase
    """start: at a random time of a life's start. any: at a random time of its steps. checkpoint, weights: while they
    are being written. journal: at a commit. close: while it closes, having been asked to. end: after the last step."""
    num_steps: int
    """Steps that are waited for first."""
    share: float
    """Of `SPREAD_S`: how long after what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a kill met."""

    moment: Moment
    step: int
    """The last step in metrics.jsonl at that time."""
    half_written: tuple[str, ...]
    """What lay there half written, just after."""
    exit_code: int | None
    """Of the run; None: it went on."""


class KilledRun:
    """One run, and its lives one after the other: `strike` for each moment, then `finish`, and `close` in any case."""

    def __init__(
        self, run_dir: Path, overrides: Sequence[str], *, max_steps: int, log: Path, env: Mapping[str, str]
    ) -> None:
        """Starts nothing yet.

        Args:
            run_dir: its folder, not there yet.
            overrides: of the quickstart's configuration.
            max_steps: of the run.
            log: where all lives write what they print.
            env: added to the environment.
        """
        self.run_dir = run_dir
        self.num_lives = 0
        """Processes that were started."""
        self.strange: list[str] = []
        """Exit codes that no kill explains."""
        self.left: list[str] = []
        """Processes and locks that outlived a life."""
        self._overrides = (*overrides, f"trainer.max_steps={max_steps}", f"run_dir={run_dir}")
        self._max_steps = max_steps
        self._log = log
        self._env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._incarnation_before = 0
        self._begun_at = 0.0
        self._start_s = math.inf
        self._is_starting = False
        _become_subreaper()

    def strike(self, moment: Moment) -> Kill | None:
        """Kills as `moment` says. None when the run ended before it came."""
        if moment.phase == "start":
            self._end_life()
        process = self._process or self._begin()
        if not self._wait_for(moment, process):
            self._settle(process)
            self.strange += [f"{process.returncode} before a kill"] if process.returncode not in (0, 130) else []
            return None
        step, victims = self.last_step(), self._victims(moment.target, process.pid)
        for pid in victims:
            _kill(pid)
        half_written = tuple(sorted(half_written_in(self.run_dir)))
        exit_code = self._exit_code(moment, process, victims)
        if exit_code is not None and exit_code not in _EXITS[moment.target]:
            self.strange.append(f"{exit_code} after {moment.target} was killed ({moment.phase})")
        return Kill(moment=moment, step=step, half_written=half_written, exit_code=exit_code)

    def finish(self) -> bool:
        """Goes on until the run has ended by itself. False when its last life fails."""
        process = self._process or self._begin()
        code = process.wait(timeout=10 * _TIMEOUT_S)
        self._settle(process)
        self.strange += [f"{code} of an undisturbed life"] if code else []
        return code == 0

    def close(self) -> None:
        """Ends what still runs."""
        if self._process is not None:
            for pid in (self._process.pid, *descendants(os.getpid())):
                _kill(pid)
            self._process.wait()
        _reap()

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 without any."""
        rows = read_rows(self.run_dir / "metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0

    def _begin(self) -> subprocess.Popen[bytes]:
        is_there = (self.run_dir / "config.resolved.yaml").exists()
        words = ["--resume", str(self.run_dir)] if is_there else [CONFIG, *self._overrides]
        rows = [row for name in ("metrics", "metrics.lost") for row in read_rows(self.run_dir / f"{name}.jsonl")]
        self._incarnation_before = max((int(row["incarnation"]) for row in rows), default=0)
        self.num_lives += 1
        self._begun_at, self._is_starting = time.monotonic(), True
        with self._log.open("ab") as log:
            log.write(f"--- life {self.num_lives}: driftgym train {' '.join(words)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "driftgym.cli", "train", *words],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        return self._process

    def _end_life(self) -> None:
        """Ends the life in progress, as ctrl-C does."""
        if (process := self._process) is not None:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=_TIMEOUT_S)
            self._settle(process)
            self.strange += [f"{code} after ctrl-C"] if code not in (0, 130) else []

    def _wait_for(self, moment: Moment, process: subprocess.Popen[bytes]) -> bool:
        """Waits until `moment` has come. False when the run ended first."""
        spread_s = SPREAD_S[moment.phase] * moment.share
        if moment.phase == "start":
            spread_s *= self._start_s if math.isfinite(self._start_s) else 5.0
        else:
            self._wait_steps(moment.num_steps, process)
        if not self._wait(self._event(moment, process), process):
            return False
        if moment.phase == "close":
            process.send_signal(signal.SIGINT)
        time.sleep(spread_s)
        return self._wait(lambda: bool(self._victims(moment.target, process.pid)), process)

    def _event(self, moment: Moment, process: subprocess.Popen[bytes]) -> Callable[[], bool]:
        """Tells whether what `moment` waits for has happened."""
        journal = self.run_dir / "journal.sqlite-wal"
        before = _changed_at(journal)
        events: Mapping[Phase, Callable[[], bool]] = {
            "start": lambda: bool(self._victims(moment.target, process.pid)),
            "checkpoint": lambda: any(half_written_in(self.run_dir / "checkpoints")),
            "weights": lambda: any(half_written_in(self.run_dir / "weights")),
            "journal": lambda: _changed_at(journal) != before,
            "end": lambda: self.last_step() == self._max_steps,
        }
        return events.get(moment.phase, lambda: True)

    def _wait_steps(self, num_steps: int, process: subprocess.Popen[bytes]) -> None:
        """Waits for so many rows more, and for one of this life at least."""
        done = self._num_own_rows()
        self._wait(lambda: self._num_own_rows() >= max(1, done + num_steps), process, poll_s=0.02)
        if self._is_starting:
            self._is_starting = False
            self._start_s = min(self._start_s, time.monotonic() - self._begun_at)

    def _num_own_rows(self) -> int:
        """The rows that the life in progress wrote."""
        rows = read_rows(self.run_dir / "metrics.jsonl")
        return sum(int(row["incarnation"]) > self._incarnation_before for row in rows)

    def _wait(self, is_so: Callable[[], bool], process: subprocess.Popen[bytes], *, poll_s: float = _POLL_S) -> bool:
        """Waits for it; False when the run ended first."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_so():
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"what a kill was to wait for did not come; see {self._log}")
            time.sleep(poll_s)
        return True

    def _victims(self, target: Target, run_pid: int) -> list[int]:
        """The processes to kill; none while they are not there."""
        if target == "trainer":
            return [run_pid]
        below = list(descendants(run_pid))
        if target == "everything":
            return [run_pid, *below]
        return [pid for pid in below if MODULES[target] in _command(pid)]

    def _exit_code(self, moment: Moment, process: subprocess.Popen[bytes], victims: Sequence[int]) -> int | None:
        """The run's, once it has ended; None when it has another generator in the place of the killed one."""
        if moment.target == "generator":
            self._wait(lambda: bool(set(self._victims("generator", process.pid)) - set(victims)), process, poll_s=0.05)
            if process.poll() is None and moment.phase != "close":
                return None
        code = process.wait(timeout=_TIMEOUT_S)
        self._settle(process)
        return code

    def _settle(self, process: subprocess.Popen[bytes]) -> None:
        """After the run's own process: waits until all that it had started is gone, and looks for what is not."""
        process.wait(timeout=_TIMEOUT_S)
        self._process = None
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while (left := _reap()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left += [f"process {_command(pid)}" for pid in left]
        for pid in left:
            _kill(pid)
        if (self.run_dir / "run.lock").exists() and not _is_free(self.run_dir / "run.lock"):
            self.left.append("run.lock is held")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a metrics file; a torn one is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}\n")]


def half_written_in(folder: Path) -> Iterator[str]:
    """What is being written below `folder`, by its name within it, or was when its writer was killed."""
    for parent in (folder, folder / "checkpoints", folder / "weights", folder / "trajectories"):
        try:
            names = os.listdir(parent)
        except FileNotFoundError:
            continue
        marked = (name for name in names if name.startswith((".partial-", ".removed-")) or name.endswith(".tmp"))
        yield from (str((parent / name).relative_to(folder)) for name in marked)


def descendants(pid: int) -> Iterator[int]:
    """The processes that it started, and those that they did; not those that have ended and wait to be reaped."""
    children: dict[int, list[int]] = {}
    for child, parent, state in _processes():
        if state != "Z":
            children.setdefault(parent, []).append(child)
    pending = [pid]
    while pending:
        found = children.get(pending.pop(), [])
        yield from found
        pending += found


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process, parent and state of all there are."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{name}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        yield int(name), int(parent), state


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _become_subreaper() -> None:
    """Processes below this one whose parent is gone become its children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> list[int]:
    """Buries adopted processes that have ended. Returns those below this one that have not."""
    for pid, parent, state in list(_processes()):
        if parent == os.getpid() and state == "Z":
            os.waitpid(pid, os.WNOHANG)
    return list(descendants(os.getpid()))


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_free(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
