"""`open_compute`: learner, generators and environments of a configuration, for a loop of one's own.

Whoever writes the loop plays with `agents.rollout.run_group`, makes rows with `segments.batch_segments`, and trains
with `Compute.client`; docs/low-level.md shows all of it.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from driftgym.trainer.lineage import Lineage
from driftgym.trainer.parts import Compute, prepare, start_compute
from driftgym.trainer.run_config import RunConfig
from driftgym.trainer.starting import StartRequest

__all__ = ["Compute", "open_compute"]


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def open_compute(
    config: RunConfig, folder: Path, *, incarnation: int = 1, say: Callable[[str], None] = _print
) -> AsyncIterator[Compute]:
    """Learner and generators, started with the configured model at policy version 0, warmed up as configured.

    Of `config`, what concerns the loop (most of `trainer`, `metrics`) is not read; `trainer.max_in_flight_groups` times
    `group_size` episodes can be played at once.

    Args:
        config: what is started.
        folder: takes publications, in `folder / "weights"`.
        incarnation: the life of the run, which weights and tokens carry; another one whenever steps were lost.
        say: takes news for people.

    Raises:
        ConfigError: something that `config` asks for is not there.
        DriftgymError: a part did not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        prepared = await prepare(config, stack, say=say)
        request = StartRequest(
            config=config,
            run_dir=folder,
            lineage=Lineage(checkpoint=None, policy_version=0, restored=(), again=()),
            incarnation=incarnation,
            say=say,
            count=lambda event: None,
        )
        yield await start_compute(prepared, request, stack)
