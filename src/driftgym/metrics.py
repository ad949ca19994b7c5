"""Metrics: one row a step, to a file that loses nothing, and to sinks that may be slow, broken or dead.

`metrics.jsonl` is written by the caller itself, one appended line a row. Every other sink has a thread and a bounded
queue of its own (`sinks.SinkThread`): one that sleeps, raises or never returns changes nothing but the count of
dropped rows. Rows carry their own `step` and `incarnation`; no sink is given a step of its own that it could refuse.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from driftgym.config import Config
from driftgym.errors import ConfigError, DriftgymError
from driftgym.sinks import Row, Sink, SinkThread

_MAX_BINS = 512  # of a histogram of W&B, which refuses a larger one


class MetricsConfig(Config):
    """Where metrics go besides `metrics.jsonl` and the console."""

    wandb_project: str | None = pydantic.Field(None, description="Weights & Biases project; null leaves it out.")
    wandb_mode: Literal["offline", "online"] = pydantic.Field(
        "offline", description="`offline` writes under the run folder and needs no account; `wandb sync` sends it."
    )


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
        """Appends one row, as `plain_row` makes it, so that every line is JSON."""
        data = _line(row)
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
        How many lines were moved. Each file is replaced whole, `path` after the lost lines are safe.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    stands = [_step_of(line) <= last_step for line in lines]
    kept = list(itertools.compress(lines, stands))
    lost = [line.removesuffix(b"\n") + b"\n" for line, is_kept in zip(lines, stands, strict=True) if not is_kept]
    if lost:
        # A kill between the two leaves lines in both files: those are not added again.
        already = lost_path.read_bytes().splitlines(keepends=True) if lost_path.exists() else []
        _replace_lines(lost_path, [*already, *(line for line in lost if line not in already)])
        _replace_lines(path, kept)
    return len(lost)


def add_missing_rows(path: Path, rows: Sequence[Row]) -> int:
    """Puts those of `rows` into `path`, in the order of their steps, whose step has no row there.

    Returns:
        How many were missing. The file is replaced whole.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    present = {_step_of(line) for line in lines}
    missing = [_line(row) for row in rows if row["step"] not in present]
    if missing:
        _replace_lines(path, sorted([*lines, *missing], key=_step_of))
    return len(missing)


def _replace_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Gives the file that content, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Metrics:
    """The hub: `log` a row a step, `say` a line, `show` what is done now, `close` at the end. Waits for no sink."""

    def __init__(self, jsonl: JsonlWriter, sinks: Sequence[Sink] = ()) -> None:
        """Rows go to `jsonl` and to `sinks`. The first failure of a sink is said, so that a count has a reason."""
        self._jsonl = jsonl
        self._threads: list[SinkThread] = []
        self._last_news: list[str] | None = None  # from the end on, when sinks may not take news any more
        self._threads += [SinkThread(sink, on_first_failure=self._tell) for sink in sinks]

    @property
    def dropped_metrics(self) -> int:
        """Rows that a sink did not take: its queue was full, it raised, or it was given up at the end."""
        return sum(thread.num_dropped for thread in self._threads)

    def log(self, row: Row) -> None:
        """Writes `row` to the file, offers it to every sink. Raises DriftgymError when the file cannot be written."""
        row = {**row, "dropped_metrics": self.dropped_metrics}
        self._jsonl.write(row)
        for thread in self._threads:
            thread.write(plain_row(row))  # each its own: what one does to it is no other's loss

    def say(self, text: str) -> None:
        """Offers a line of news to every sink."""
        for thread in self._threads:
            thread.say(text)

    def show(self, text: str) -> None:
        """Offers what is being done or waited for to every sink."""
        for thread in self._threads:
            thread.show(text)

    def _tell(self, text: str) -> None:
        if self._last_news is None:
            self.say(text)
        else:
            self._last_news.append(text)

    def close(self, *, timeout_s: float) -> Sequence[str]:
        """Ends every sink, giving up on those that are not through after `timeout_s`, all together.

        Returns:
            What went wrong with them meanwhile, in lines for people: there is no sink left to tell it.
        """
        news = self._last_news = []
        for thread in self._threads:
            thread.end()
        left_s = timeout_s
        for thread in self._threads:
            left_s -= thread.join(left_s)
        self._jsonl.close()
        return tuple(news)


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


def check_metrics(config: MetricsConfig) -> None:
    """Raises ConfigError when what `config` asks for is not installed, or asks for a key that is not there."""
    import importlib.util

    if config.wandb_project is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.wandb_project: the package wandb is missing; pip install 'driftgym[wandb]'")
    if config.wandb_mode == "online" and not _has_wandb_key():
        raise ConfigError(
            "metrics.wandb_mode: online needs a key, and there is none; run `wandb login`, or take offline, which "
            "needs none"
        )


def _has_wandb_key() -> bool:
    """Without a key, W&B would ask for one on the terminal, in the middle of the run."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # a release that knows no `prompt`
        return True


def _as_wandb_value(value: Any) -> Any:
    """`value`; counts by whole number, which would become a chart for each number, as a histogram."""
    if not isinstance(value, Mapping) or not value:
        return value
    import wandb

    numbers = sorted(map(int, value))
    size = math.ceil(len(numbers) / _MAX_BINS)
    bins = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    edges = [*(each[0] for each in bins), numbers[-1] + 1]
    return wandb.Histogram(np_histogram=([sum(value[str(number)] for number in each) for each in bins], edges))


def _line(row: Row) -> bytes:
    """`row` as a line; what UTF-8 cannot say, half a surrogate pair, becomes an escape that JSON knows."""
    return (json.dumps(plain_row(row), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def plain_row(row: Row) -> dict[str, Any]:
    """A copy of `row` that JSON can say: the values of NumPy and torch as Python's, what is not finite as None, and
    what is no figure as text."""
    return {str(name): _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return plain_row(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return str(value)


def _step_of(line: bytes) -> float:
    """The step of a row; infinite for a line that is no row."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
