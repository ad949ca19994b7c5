"""Metrics: one row a step, to a file that loses nothing, and to sinks that may be slow, broken or dead.

`metrics.jsonl` is written by the caller itself, one appended line a row. Every other sink has a daemon thread and
a bounded queue of its own: one that sleeps, raises or never returns changes nothing but the count of dropped rows.
Rows carry their own `step` and `incarnation`; no sink is given a step of its own that it could refuse.
"""

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pydantic

from driftgym.config import Config
from driftgym.errors import ConfigError, DriftgymError

Row = Mapping[str, Any]
_THREAD_NAME = "sink "
_QUEUE_ROWS = 256  # a sink that lags this many steps behind is taken for dead


class MetricsConfig(Config):
    """Where metrics go besides `metrics.jsonl` and the console."""

    wandb_project: str | None = pydantic.Field(None, description="Weights & Biases project; null leaves it out.")
    wandb_mode: Literal["offline", "online"] = pydantic.Field(
        "offline", description="`offline` writes under the run folder and needs no account; `wandb sync` sends it."
    )


class Sink(Protocol):
    """A place that rows go to. Called from one thread of its own; may be slow and may raise."""

    def write(self, row: Row) -> None:
        """Takes the figures of one step."""
        ...

    def say(self, text: str) -> None:
        """Takes a line of news for people."""
        ...

    def show(self, text: str) -> None:
        """Takes what is being done or waited for at this moment: soon out of date, and then of no interest."""
        ...

    def close(self) -> None:
        """Ends."""
        ...


class JsonlWriter:
    """Appends rows to a file, one JSON object a line, each with one `write`: a kill leaves at most the last one torn.

    Raises DriftgymError when the disk refuses: rows are never lost silently.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise DriftgymError(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, row: Row) -> None:
        """Appends one row; figures that are not finite are written as null, so that every line is JSON."""
        data = (json.dumps(_finite(row), ensure_ascii=False) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise DriftgymError(f"{self._path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def split_lost_rows(path: Path, lost_path: Path, *, last_step: int) -> int:
    """Moves the rows of steps above `last_step`, and a torn last line, from `path` to the end of `lost_path`.

    Returns:
        How many lines were moved. The file is replaced whole, after the lost lines are safe.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= last_step]
    lost = [line if line.endswith(b"\n") else line + b"\n" for line in lines if _step_of(line) > last_step]
    if lost:
        # A kill between the two writes leaves the lines in both files: those are not appended again.
        already = lost_path.read_bytes() if lost_path.exists() else b""
        with lost_path.open("ab") as file:
            file.writelines([] if already.endswith(b"".join(lost)) else lost)
            file.flush()
            os.fsync(file.fileno())
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(path)
    return len(lost)


class Metrics:
    """The hub: `log` a row a step, `say` a line, `close` at the end. Never waits for a sink."""

    def __init__(self, jsonl: JsonlWriter, sinks: Sequence[Sink] = ()) -> None:
        self._jsonl = jsonl
        self._threads = [_SinkThread(sink) for sink in sinks]

    @property
    def dropped_metrics(self) -> int:
        """Rows that a sink did not take: its queue was full, it raised, or it was given up at the end."""
        return sum(thread.num_dropped for thread in self._threads)

    def log(self, row: Row) -> None:
        """Writes `row` to the file and offers it to every sink."""
        row = {**row, "dropped_metrics": self.dropped_metrics}
        self._jsonl.write(row)
        for thread in self._threads:
            thread.offer(("row", row))

    def say(self, text: str) -> None:
        """Offers a line of news to every sink."""
        for thread in self._threads:
            thread.offer(("say", text))

    def show(self, text: str) -> None:
        """Offers what is being done or waited for to every sink."""
        for thread in self._threads:
            thread.offer(("show", text))

    def close(self, *, timeout_s: float) -> None:
        """Ends every sink, giving up on those that are not through after `timeout_s`, all together."""
        for thread in self._threads:
            thread.end()
        left_s = timeout_s
        for thread in self._threads:
            left_s -= thread.join(left_s)
        self._jsonl.close()


class _SinkThread:
    """A sink behind a queue. `offer` never blocks."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=_QUEUE_ROWS)
        self._is_ending = threading.Event()
        self._has_row_in_hand = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME + type(sink).__name__, daemon=True)
        self._thread.start()

    def offer(self, item: tuple[str, Any]) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_dropped += item[0] == "row"

    def end(self) -> None:
        self._is_ending.set()
        self.offer(("end", None))

    def join(self, timeout_s: float) -> float:
        """Waits for the sink to take what is queued and close. Returns the seconds that it took."""
        start = time.monotonic()
        self._thread.join(max(timeout_s, 0.0))
        if self._thread.is_alive():
            self.num_dropped += self._num_rows_left()
        return time.monotonic() - start

    def _num_rows_left(self) -> int:
        left = int(self._has_row_in_hand)
        while True:
            try:
                left += self._queue.get_nowait()[0] == "row"
            except queue.Empty:
                return left

    def _run(self) -> None:
        while True:
            try:
                kind, value = self._queue.get(timeout=0.0 if self._is_ending.is_set() else None)
            except queue.Empty:
                kind, value = "end", None
            self._has_row_in_hand = kind == "row"
            if not self._take(kind, value):
                self.num_dropped += kind == "row"
            self._has_row_in_hand = False
            if kind == "end":
                return

    def _take(self, kind: str, value: Any) -> bool:
        try:
            if kind == "row":
                self._sink.write(value)
            elif kind == "say":
                self._sink.say(value)
            elif kind == "show":
                self._sink.show(value)
            else:
                self._sink.close()
        except Exception:  # a sink's failure is counted, never raised: metrics must not end a run
            return False
        return True


class ConsoleSink:
    """Rows for people: a progress line under a growing list on a terminal, plain lines elsewhere."""

    def __init__(self, *, max_steps: int, stream: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("", total=max_steps)
            self._progress.start()

    def write(self, row: Row) -> None:
        """One line for the step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"])
        self.say(step_line(row))

    def say(self, text: str) -> None:
        """A line of its own."""
        console = self._console if self._progress is None else self._progress.console
        console.print(text, markup=False)

    def show(self, text: str) -> None:
        """The end of the progress line on a terminal; nothing elsewhere."""
        if self._progress is not None:
            from rich.markup import escape

            self._progress.update(self._task, description=escape(text))

    def close(self) -> None:
        """Takes the progress line away."""
        if self._progress is not None:
            self._progress.stop()


class WandbSink:
    """Rows to Weights & Biases, with `step` as the x-axis of every figure, so that none is refused after a resume."""

    def __init__(self, config: MetricsConfig, *, run_dir: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._config, self._run_dir, self._name, self._settings = config, run_dir, name, settings
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Logs one row; the run is begun with the first, in the sink's own thread."""
        if self._run is None:
            self._run = self._begin()
        self._run.log({name: _as_wandb_value(value) for name, value in row.items()})

    def say(self, text: str) -> None:
        """Nothing: news are for the console."""

    def show(self, text: str) -> None:
        """Nothing, likewise."""

    def close(self) -> None:
        """Ends the run."""
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> Any:
        import wandb

        run = wandb.init(
            project=self._config.wandb_project,
            mode=self._config.wandb_mode,
            dir=str(self._run_dir),
            name=self._name,
            group=self._name,
            config=dict(self._settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def any_sink_is_alive() -> bool:
    """True while a sink of this process is at work; after `Metrics.close`: one that was given up."""
    return any(thread.name.startswith(_THREAD_NAME) for thread in threading.enumerate())


def check_metrics(config: MetricsConfig) -> None:
    """Raises ConfigError when what `config` asks for is not installed."""
    import importlib.util

    if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.wandb_project: the package wandb is missing; pip install 'driftgym[wandb]'")


def step_line(row: Row) -> str:
    """The step in one line: reward, lag, idle shares, and what went wrong so far.

    >>> step_line({"step": 3, "reward_mean": 0.25, "lag_mean": 1.0, "lag_max": 2, "step_s": 0.1, "wait_s": 0.0})
    'step     3  reward 0.250  lag 1.0 (max 2)  step 0.10 s  wait 0.00 s'
    """
    parts = [
        f"step {row['step']:5d}",
        f"reward {_figure(row.get('reward_mean'), '.3f')}",
        f"lag {_figure(row.get('lag_mean'), '.1f')} (max {row.get('lag_max', '-')})",
        f"step {_figure(row.get('step_s'), '.2f')} s",
        f"wait {_figure(row.get('wait_s'), '.2f')} s",
    ]
    if "generator_idle_fraction" in row:
        idle = (_figure(row.get(f"{name}_idle_fraction"), ".0%") for name in ("generator", "trainer"))
        parts.append("idle generator {} trainer {}".format(*idle))
    troubles = {name: row.get(f"errors_{name}", 0) for name in ("env", "infra")}
    if any(troubles.values()):
        parts.append("errors " + " ".join(f"{name} {count}" for name, count in troubles.items()))
    return "  ".join(parts)


def _figure(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) and math.isfinite(value) else "-"


def _as_wandb_value(value: Any) -> Any:
    """`value`; counts by whole number, which would become a chart for each number, as a histogram."""
    if not isinstance(value, Mapping) or not value:
        return value
    import wandb

    numbers = sorted(map(int, value))
    edges = [*numbers, numbers[-1] + 1]
    return wandb.Histogram(np_histogram=([value[str(number)] for number in numbers], edges))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def _step_of(line: bytes) -> float:
    """The step of a row; infinite for a line that is no row."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
