"""What a `SandboxPool` knows of its boxes: a `Slot` for each, a `Shelf` for each kind of box, the `Room` for all."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import Sandbox, SandboxSpec

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MAX_UNUSED_SHELVES = 4
"""Kinds of boxes that are kept ready although nobody has one: of a thousand images, each used once, few are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment, and what it has done since it was made.

    >>> PoolStats(num_warm=2, num_leased=3).num_warm
    2
    """

    num_warm: int = 0
    """Boxes that are ready and nobody's."""
    num_leased: int = 0
    """Boxes that were handed out, those whose health is being asked for included."""
    num_starting: int = 0
    """Boxes that are being started."""
    num_resetting: int = 0
    """Boxes that were given back and are being cleaned."""
    num_closing: int = 0
    """Boxes that are being removed."""
    num_waiting: int = 0
    """Requests without a box."""
    memory_bytes: int = 0
    """The memory limits of all these boxes together."""
    num_started: int = 0
    """Boxes started so far."""
    num_failed_starts: int = 0
    """Starts that failed so far."""
    num_reused: int = 0
    """How often a box came back into service."""
    num_discarded: int = 0
    """Boxes thrown away so far."""
    num_unhealthy: int = 0
    """Of those, boxes that were found dead before they were handed out."""

    @property
    def num_boxes(self) -> int:
        """All boxes that the pool's bounds count: those being started and removed too."""
        return self.num_warm + self.num_leased + self.num_starting + self.num_resetting + self.num_closing


@dataclass(slots=True, eq=False, kw_only=True)
class Shelf:
    """The boxes of one spec."""

    spec: SandboxSpec
    """What they are made of."""
    timeout_s: float = 0.0
    """How long a start may take, in seconds: the longest that was asked for."""
    idle: "list[Slot]" = field(default_factory=list)
    """Those that are ready, the one that has waited longest first."""
    num_out: int = 0
    """Boxes that were handed out."""
    num_starting: int = 0
    """Boxes being started."""
    num_resetting: int = 0
    """Boxes being cleaned."""
    num_waiting: int = 0
    """Requests without a box."""
    num_failures: int = 0
    """Starts that failed since the last one that did not."""
    failed_at_s: float = 0.0
    """When the last one did, by the loop's clock."""

    @property
    def num_coming(self) -> int:
        """Boxes that will be ready without anybody doing anything more."""
        return self.num_starting + self.num_resetting

    @property
    def is_used(self) -> bool:
        """True while anybody has, or waits for, such a box."""
        return self.num_out + self.num_waiting > 0

    def note_failure(self, now_s: float) -> None:
        """A start failed."""
        self.num_failures += 1
        self.failed_at_s = now_s

    def may_refill(self, now_s: float) -> bool:
        """False for a while after failed starts, longer after each: the engine is not asked in vain all the time."""
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.num_failures - 1)) if self.num_failures else 0.0
        return now_s >= self.failed_at_s + pause_s


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A box that has started and is not being removed."""

    shelf: Shelf
    """Where it belongs."""
    box: Sandbox
    """The provider's."""
    is_untried: bool = True
    """True until it was idle: a box that has just started needs no question after its health."""
    is_dirty: bool = False
    """True when a call into it failed or was given up: it is not handed out again."""
    num_calls: int = 0
    """Calls into it that have not ended."""


class Shelves:
    """Every shelf; the one asked for last is last."""

    def __init__(self) -> None:
        self._shelves: dict[str, Shelf] = {}

    def __iter__(self) -> Iterator[Shelf]:
        """The shelves; they may be tidied meanwhile."""
        return iter(list(self._shelves.values()))

    @property
    def num_starting(self) -> int:
        """Boxes being started."""
        return sum(shelf.num_starting for shelf in self._shelves.values())

    def ask(self, spec: SandboxSpec, *, timeout_s: float) -> Shelf:
        """The shelf of `spec`, made when it is not there. A start may take `timeout_s` at least."""
        key = spec.model_dump_json()
        shelf = self._shelves.pop(key, None) or Shelf(spec=spec)
        shelf.timeout_s = max(timeout_s, shelf.timeout_s)
        self._shelves[key] = shelf
        return shelf

    def tidy(self) -> "list[Slot]":
        """Forgets kinds of boxes that nobody has and none is ready of. Returns what nobody has asked for lately, which
        is no longer on its shelf."""
        unused = [(key, shelf) for key, shelf in self._shelves.items() if not shelf.is_used and not shelf.num_coming]
        stocked = [shelf for _, shelf in unused if shelf.idle]
        dusty: list[Slot] = []
        for shelf in stocked[: max(0, len(stocked) - _MAX_UNUSED_SHELVES)]:
            dusty += shelf.idle
            shelf.idle.clear()
        for key, shelf in unused:
            if not shelf.idle:
                del self._shelves[key]
        return dusty

    def clear(self) -> None:
        """Forgets all."""
        self._shelves.clear()


class Room:
    """How many boxes there may be at once, and of how much memory. A box counts until it has been removed."""

    def __init__(self, *, max_boxes: int, max_memory_bytes: int | None) -> None:
        self._max_boxes = max_boxes
        self._max_memory_bytes = max_memory_bytes
        self._num_boxes = 0
        self._memory_bytes = 0
        self._num_leaving = 0
        self._leaving_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """The memory limits of all boxes together."""
        return self._memory_bytes

    @property
    def num_leaving(self) -> int:
        """Boxes that are being removed."""
        return self._num_leaving

    def check(self, spec: SandboxSpec) -> None:
        """Raises SandboxError when there is never room for such a box."""
        if self._max_memory_bytes is not None and spec.memory_bytes > self._max_memory_bytes:
            raise SandboxError(
                f"a box with sandbox.spec.memory_bytes {spec.memory_bytes} never fits into "
                f"sandbox.pool.max_memory_bytes {self._max_memory_bytes}"
            )

    def has(self, num_bytes: int) -> bool:
        """True when a box of that memory may be started now."""
        return self._fits(self._num_boxes, self._memory_bytes + num_bytes)

    def will_have(self, num_bytes: int) -> bool:
        """True when it may be started once those that are leaving are gone."""
        return self._fits(self._num_boxes - self._num_leaving, self._memory_bytes - self._leaving_bytes + num_bytes)

    def enter(self, num_bytes: int) -> None:
        """A box of that memory is being started."""
        self._num_boxes += 1
        self._memory_bytes += num_bytes

    def begin_leaving(self, num_bytes: int) -> None:
        """It is being removed."""
        self._num_leaving += 1
        self._leaving_bytes += num_bytes

    def leave(self, num_bytes: int, *, was_leaving: bool) -> None:
        """It is gone."""
        self._num_boxes -= 1
        self._memory_bytes -= num_bytes
        if was_leaving:
            self._num_leaving -= 1
            self._leaving_bytes -= num_bytes

    def _fits(self, num_others: int, num_bytes: int) -> bool:
        return num_others < self._max_boxes and (self._max_memory_bytes is None or num_bytes <= self._max_memory_bytes)
