"""Where tasks come from: an endless list, the same in every process that names the same seed."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftgym.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededTasks:
    """The tasks of an environment that makes its world from a seed.

    >>> tasks = SeededTasks(env_id="driftgym/Lookup-v0", seed=1)
    >>> tasks.task(7) == SeededTasks(env_id="driftgym/Lookup-v0", seed=1).task(7)
    True
    >>> tasks.task(7).seed != tasks.task(8).seed
    True
    """

    env_id: str
    """The environment that plays them."""
    seed: int
    """Which list: another seed gives other tasks. Of two lists of n tasks about n * n / 2**31 are shared by chance."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Given to every task, which gives it to `areset` as options."""

    def task(self, index: int) -> Task:
        """The task at `index`, from 0. Raises ValueError for a negative one."""
        if index < 0:
            raise ValueError(f"SeededTasks: index must not be negative, got {index}")
        name = self.env_id.rpartition("/")[2].rpartition(":")[2]
        digest = hashlib.sha256(f"{self.seed}:{index}".encode()).digest()
        return Task(
            task_id=f"{name}-{self.seed}-{index}",
            env_id=self.env_id,
            seed=int.from_bytes(digest[:4], "big") >> 1,
            metadata=self.metadata,
        )
