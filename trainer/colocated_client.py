"""`ColocatedTrainingClient`: a learner's process that also generates, seen from the trainer. No torch."""

import asyncio
from typing import Any, NoReturn

from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.agents.generators.turns import TurnTakingPool
from driftgym.errors import TrainingError
from driftgym.trainer.producer import PlayGroup
from driftgym.trainer.training_client import ProcessTrainingClient
from driftgym.types import Task, TrajectoryGroup

CHANGE_WEIGHTS = ("optim_step", "load")
"""Calls after which the engine waits to be told the name of its weights."""
TAKE_THE_TURN = ("forward_backward", *CHANGE_WEIGHTS)
"""Calls during which it computes nothing."""


class ColocatedTrainingClient(ProcessTrainingClient):
    """A learner and an engine that take turns in one process, on one copy of the weights. Made by `start`.

    Passes and optimizer steps wait until the requests under way at the engine have ended, and the clocks of those that
    wait for a place there stand still; calls that were submitted without waiting in between have one turn. After
    `optim_step`, and after `load`, the engine answers nothing before it is given the publication of these weights.
    `publish` writes a folder before `serve`, and with `is_last`; in between it writes nothing, and its update has the
    transport `tensor`.
    """

    module = "driftgym.trainer.colocated"
    _pool: TurnTakingPool | None = None
    _has_changed = False  # since the turn was taken, the weights

    async def serve(self, config: GeneratorConfig) -> str:
        """Starts the engine, on the weights as they are. Returns its root, which speaks as an embedded server's.

        Raises:
            ConfigError: the model cannot be served.
            TrainingError: the learner is gone, or serves already.
        """
        url: str = await self._submit("serve", config)
        return url

    def takes_turns_with(self, pool: TurnTakingPool) -> None:
        """What asks the engine; told when the learner takes its turn, and when it gives it back."""
        self._pool = pool

    async def lost(self) -> NoReturn:
        """Waits for the end of the process.

        Raises:
            TrainingError: it has ended.
        """
        code = await self._process.ended()
        raise TrainingError(
            f"the learner is gone, and with it the engine in its process: learner (pid {self.pid}) ended with exit "
            f"code {code}"
        )

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        pool = self._pool
        if pool is not None and method in TAKE_THE_TURN:
            await pool.lend_turn()
        is_followed = self._calls.is_followed
        try:
            result = await super()._call(method, *args, is_followed=is_followed, **kwargs)
            self._has_changed = self._has_changed or (pool is not None and method in CHANGE_WEIGHTS)
            return result
        finally:
            if pool is not None and not is_followed:
                has_changed, self._has_changed = self._has_changed, False
                pool.take_turn_back(have_weights_changed=has_changed)


def while_it_lives(play: PlayGroup, client: ColocatedTrainingClient) -> PlayGroup:
    """As `play`; ends with TrainingError as soon as the process of `client` does: nobody would answer any more."""

    async def guarded(task: Task, *, group_id: str, min_policy_version: int) -> TrajectoryGroup:
        playing = asyncio.create_task(play(task, group_id=group_id, min_policy_version=min_policy_version))
        losing: asyncio.Task[TrajectoryGroup] = asyncio.create_task(client.lost())
        try:
            done, _ = await asyncio.wait((playing, losing), return_when=asyncio.FIRST_COMPLETED)
            return (losing if losing in done else playing).result()
        finally:
            playing.cancel()
            losing.cancel()
            await asyncio.gather(playing, losing, return_exceptions=True)

    return guarded
