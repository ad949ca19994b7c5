"""`driftgym/Lookup-v0` whose tools take their time, for benchmarks: its id is `slow_lookup:SlowLookup-v0`.

How long the calls of an episode take follows from the episode's seed, so that whoever plays the same tasks waits for
the same tools:

- `instant`: no time;
- `constant`: 0.5 s;
- `heavy_tail`: 0 to 5 s, lognormal with a median of 0.5 s and sigma 1.25, cut at 5 s. The mean is 0.94 s, a call in ten
  takes 2.5 s or more, and one in thirty 5 s.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium

from driftgym.config import Limits
from driftgym.envs.base import ResetResult
from driftgym.envs.lookup.env import LookupEnv
from driftgym.envs.lookup.store import LatencyDraws
from driftgym.sandboxes.base import SandboxProvider, SandboxSpec

ENV_ID = "slow_lookup:SlowLookup-v0"
Latency = Literal["instant", "constant", "heavy_tail"]

CONSTANT_S = 0.5
MEDIAN_S = 0.5
SIGMA = 1.25
LONGEST_S = 5.0


class CutDraws(LatencyDraws):
    """Draws that are `LONGEST_S` where they would be longer."""

    def next_s(self) -> float:
        """The next call's latency, in seconds."""
        return min(super().next_s(), LONGEST_S)


def latency_draws(latency: Latency, *, seed: int) -> LatencyDraws:
    """How long the calls of the episode of `seed` take, one after the other."""
    if latency == "instant":
        return LatencyDraws(seed=seed, mean_s=0.0, sigma=0.0)
    if latency == "constant":
        return LatencyDraws(seed=seed, mean_s=CONSTANT_S, sigma=0.0)
    # The mean of a lognormal is its median times exp(sigma^2 / 2).
    return CutDraws(seed=seed, mean_s=MEDIAN_S * math.exp(SIGMA**2 / 2), sigma=SIGMA)


class SlowLookupEnv(LookupEnv):
    """`LookupEnv` with the latencies of this module."""

    def __init__(
        self,
        *,
        latency: Latency = "heavy_tail",
        sandboxes: SandboxProvider | None = None,
        sandbox_spec: SandboxSpec | None = None,
        limits: Limits | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        """As `LookupEnv`, with `latency` in the place of its own."""
        super().__init__(
            sandboxes=sandboxes, sandbox_spec=sandbox_spec, limits=limits, render_mode=render_mode, **settings
        )
        self._kind = latency

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """See `LookupEnv.areset`."""
        seed = self.episode_seed(seed)
        result = await super().areset(seed=seed, options=options)
        self._latency = latency_draws(self._kind, seed=seed)
        return result


if "SlowLookup-v0" not in gymnasium.registry:
    gymnasium.register("SlowLookup-v0", entry_point="slow_lookup:SlowLookupEnv")
