"""Metrics: one row a step, to a file that loses nothing, and to sinks that may be slow, broken or dead.

`metrics.jsonl` is written by the caller itself, one appended line a row. Every other sink has a thread and a bounded
queue of its own (`sinks.SinkThread`): one that sleeps, raises or never returns changes nothing but the count of
dropped rows. Rows carry their own `step` and `incarnation`; no sink is given a step of its own that it could refuse.
"""

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
        How many lines were moved. Each file is replaced whole, `path` after the lost lines are safe.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= last_step]
    lost = [line if line.endswith(b"\n") else line + b"\n" for line in lines if _step_of(line) > last_step]
    if lost:
        # A kill between the two leaves lines in both files: those are not added again.
        already = lost_path.read_bytes().splitlines(keepends=True) if lost_path.exists() else []
        _replace_lines(lost_path, [*already, *(line for line in lost if line not in already)])
        _replace_lines(path, kept)
    return len(lost)


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
        self._threads += [SinkThread(sink, on_first_failure=self.say) for sink in sinks]

    @property
    def dropped_metrics(self) -> int:
        """Rows that a sink did not take: its queue was full, it raised, or it was given up at the end."""
        return sum(thread.num_dropped for thread in self._threads)

    def log(self, row: Row) -> None:
        """Writes `row` to the file, offers it to every sink. Raises DriftgymError when the file cannot be written."""
        row = {**row, "dropped_metrics": self.dropped_metrics}
        self._jsonl.write(row)
        for thread in self._threads:
            thread.write(row)

    def say(self, text: str) -> None:
        """Offers a line of news to every sink."""
        for thread in self._threads:
            thread.say(text)

    def show(self, text: str) -> None:
        """Offers what is being done or waited for to every sink."""
        for thread in self._threads:
            thread.show(text)

    def close(self, *, timeout_s: float) -> None:
        """Ends every sink, giving up on those that are not through after `timeout_s`, all together."""
        for thread in self._threads:
            thread.end()
        left_s = timeout_s
        for thread in self._threads:
            left_s -= thread.join(left_s)
        self._jsonl.close()


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
    """Raises ConfigError when what `config` asks for is not installed."""
    import importlib.util

    if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.wandb_project: the package wandb is missing; pip install 'driftgym[wandb]'")


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
