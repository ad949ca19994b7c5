"""`ColocatedTrainingClient`: a learner's process that also generates, seen from the trainer. No torch."""

import asyncio
from typing import Any, NoReturn

from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.errors import TrainingError
from driftgym.trainer.producer import PlayGroup
from driftgym.trainer.training_client import ProcessTrainingClient
from driftgym.types import Task, TrajectoryGroup


class ColocatedTrainingClient(ProcessTrainingClient):
    """A learner and an engine that take turns in one process, on one copy of the weights. Made by `start`.

    Passes and optimizer steps wait until the requests under way at the engine have ended; calls that were submitted
    without waiting in between have one turn. After `optim_step`, and after `load`, the engine answers nothing before
    it is given the publication of these weights. `publish` writes a folder before `serve`, and with `is_last`; in
    between it writes nothing, and its update has the transport `tensor`.
    """

    module = "driftgym.trainer.colocated"

    async def serve(self, config: GeneratorConfig) -> str:
        """Starts the engine, on the weights as they are. Returns its root, which speaks as an embedded server's.

        Raises:
            ConfigError: the model cannot be served.
            TrainingError: the learner is gone, or serves already.
        """
        url: str = await self._submit("serve", config)
        return url

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
        return await super()._call(method, *args, is_followed=self._calls.is_followed, **kwargs)


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
