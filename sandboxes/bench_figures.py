"""The figures of the benchmark of boxes, and their forms: JSON, and lines for people."""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long one call took, over many.

    >>> Latency.of([0.001, 0.002, 0.003]).p50_ms
    2.0
    """

    num_calls: int
    """How many calls."""
    p50_ms: float
    """Half of them were as fast, in milliseconds."""
    p99_ms: float
    """99 of 100 were as fast."""
    max_ms: float
    """The slowest."""

    @classmethod
    def of(cls, durations_s: list[float]) -> "Latency":
        """Of the durations of one call or more, in seconds."""
        ordered_ms = sorted(1000 * duration_s for duration_s in durations_s)
        return cls(
            num_calls=len(ordered_ms),
            p50_ms=round(statistics.median(ordered_ms), 3),
            p99_ms=round(ordered_ms[min(len(ordered_ms) - 1, int(0.99 * len(ordered_ms)))], 3),
            max_ms=round(ordered_ms[-1], 3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLatencies:
    """Calls into one box.

    >>> BoxLatencies(exec_argv=Latency.of([1.0]), exec_shell=Latency.of([1.0]), ask=None, reset=None).ask
    """

    exec_argv: Latency
    """`true`, as an argv."""
    exec_shell: Latency
    """`true`, as a shell line."""
    ask: Latency | None
    """A line asked of a process that is there already; None where it is not measured."""
    reset: Latency | None
    """Back to a clean box, after a command that wrote a file and left a process; None where it is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Boxes per second from a pool that gives each episode a new one, and the engine's bare containers beside.

    A turn counts all that a box takes: of the pool from its opening to the last removal, each box being one that
    answers; of the engine creation, start and removal, with the same image, limits and mounts, and a program that
    sleeps.

    >>> Rates(concurrency=16, boxes_per_turn=32, pool_per_s=(3.0, 3.0), engine_per_s=(3.0, 4.0)).pool_share
    0.875
    """

    concurrency: int
    """So many at once."""
    boxes_per_turn: int
    """So many in each turn."""
    pool_per_s: tuple[float, ...]
    """Of each turn of the pool."""
    engine_per_s: tuple[float, ...]
    """Of the engine's turn beside each."""

    @property
    def pool_share(self) -> float:
        """The pool's rate as a share of the engine's own: the median over the pairs of turns."""
        return statistics.median(mine / own for mine, own in zip(self.pool_per_s, self.engine_per_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigures:
    """All that one run measures."""

    image: str
    """The image of the boxes."""
    runtime: str | None
    """The engine's runtime; None is its default."""
    num_cores: int
    """Cores of this machine."""
    load_1min: float
    """Processes of this machine that ran or wanted to, over the minute before: far above 0, the figures are others'."""
    wall_s: float
    """How long it took to measure."""
    toolbox: BoxLatencies | None
    """Through the toolbox; None where the image holds no Python."""
    engine: BoxLatencies
    """Through the engine's exec."""
    cold_start: Latency
    """A box created and started, until it answers."""
    warm_acquire: Latency
    """A box from a pool that has one ready."""
    rates: Rates
    """Boxes per second."""

    def as_dict(self) -> dict[str, Any]:
        """All fields, and `rates.pool_share`, as JSON takes them."""
        figures = dataclasses.asdict(self)
        figures["rates"]["pool_share"] = round(self.rates.pool_share, 3)
        return figures

    def describe(self) -> str:
        """A line per figure, for people."""
        latencies = [("cold start", self.cold_start), ("warm acquire", self.warm_acquire)]
        for name, box in (("toolbox", self.toolbox), ("engine", self.engine)):
            if box is not None:
                parts = [("exec, argv", box.exec_argv), ("exec, shell", box.exec_shell)]
                parts += [(part, latency) for part, latency in (("ask", box.ask), ("reset", box.reset)) if latency]
                latencies += [(f"{name}: {part}", latency) for part, latency in parts]
        lines = [
            f"{name:22} p50 {of.p50_ms:9.2f} ms   p99 {of.p99_ms:9.2f} ms   ({of.num_calls})" for name, of in latencies
        ]
        rates = self.rates
        pool, own = statistics.median(rates.pool_per_s), statistics.median(rates.engine_per_s)
        lines.append(
            f"boxes per second       pool {pool:.2f}   engine alone {own:.2f}   "
            f"share {rates.pool_share:.2f}   ({rates.concurrency} at once)"
        )
        machine = f"{self.num_cores} cores, load {self.load_1min:.1f} before"
        where = f"{self.image}, {self.runtime or 'the default runtime'}, {machine}, {self.wall_s:.0f} s"
        return "\n".join([where, *lines])
