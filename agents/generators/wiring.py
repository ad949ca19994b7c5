"""The parts of a pool, put together."""

from collections.abc import Callable
from dataclasses import dataclass

from driftgym.agents.generators.figures import Figures
from driftgym.agents.generators.joining import Joining
from driftgym.agents.generators.parking import Parking
from driftgym.agents.generators.places import Places
from driftgym.agents.generators.restarts import Background, OnEvent, Restart, Restarts
from driftgym.agents.generators.rolling import Weights
from driftgym.agents.generators.roster import Roster
from driftgym.agents.generators.slices import Slicer
from driftgym.agents.generators.watch import Recovery, Watch, WatchOptions
from driftgym.types import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a pool works; the arguments of `GeneratorPool`, which tells of each.

    >>> PoolOptions.__slots__[:3]
    ('policy_version', 'came_with', 'chunk_tokens')
    """

    policy_version: int
    came_with: WeightUpdate | None
    chunk_tokens: int | None
    iteration_tokens: int | None
    max_concurrency: int | None
    max_paused_share: float
    max_parked_s: float
    idle_s: float
    watch: WatchOptions
    restart: Restart | None
    restart_timeout_s: float
    max_restarts: int
    on_event: OnEvent


class PoolParts:
    """Each part, and who tells whom: a change among the engines goes to `on_change`."""

    def __init__(self, options: PoolOptions, *, on_change: Callable[[], None]) -> None:
        """Starts nothing."""
        self.aside = Background(_nothing)
        """Ends engines that are lost."""
        self.work = Background(_nothing)
        """Whatever ends with the pool."""
        self.restarts = Restarts(
            options.restart,
            timeout_s=options.restart_timeout_s,
            max_restarts=options.max_restarts,
            let_in=lambda generator: self.joining.replace_lost(generator),
            on_event=options.on_event,
            on_end=on_change,
        )
        self.roster = Roster(
            background=self.aside,
            on_event=options.on_event,
            on_change=on_change,
            replace=self.restarts.replace,
            recover=lambda member: self.recovery.start(member),
            is_coming=lambda: self.restarts.tasks.is_busy,
        )
        self.places = Places(self.roster)
        self.watch = Watch(
            self.roster,
            options=options.watch,
            background=self.work,
            on_change=on_change,
            are_right=lambda member, version: self.weights.are_right(member, version),
        )
        self._add_weights(options, on_change)
        self._add_requests(options)

    def _add_weights(self, options: PoolOptions, on_change: Callable[[], None]) -> None:
        self.weights = Weights(
            self.roster,
            policy_version=options.policy_version,
            came_with=options.came_with,
            max_paused_share=options.max_paused_share,
            timeout_s=options.restart_timeout_s,
            on_change=on_change,
        )
        self.joining = Joining(self.roster, self.weights, self.places, max_concurrency=options.max_concurrency)
        self.recovery = Recovery(
            self.roster, options=options.watch, background=self.work, catch_up=self.joining.catch_up
        )

    def _add_requests(self, options: PoolOptions) -> None:
        self.parking = Parking(
            self.places,
            iteration_tokens=options.iteration_tokens,
            max_parked_s=options.max_parked_s,
            idle_s=options.idle_s,
            background=self.work,
        )
        weights = self.weights
        self.slicer = Slicer(
            self.places,
            self.parking,
            self.watch,
            chunk_tokens=options.chunk_tokens,
            newest_version=lambda: None if weights.latest_update is None else weights.latest_version,
            background=self.work,
        )
        self.figures = Figures(self.roster, self.places, self.parking, timeout_s=options.watch.timeout_s)


def _nothing() -> None:
    """What the end of a task changes that tells of its changes itself."""
