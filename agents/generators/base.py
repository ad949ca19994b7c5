"""The contract of a generator, and the name that versions of weights have on the wire."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from driftgym.types import Completion, SamplingParams, WeightUpdate

_VERSION = re.compile(r"([0-9]+):([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WeightVersion:
    """A policy version and the life of the run that published it, as engines report it.

    >>> WeightVersion.parse("2:41")
    WeightVersion(incarnation=2, policy_version=41)
    >>> str(WeightVersion(incarnation=2, policy_version=41))
    '2:41'
    """

    incarnation: int
    """The life of the run."""
    policy_version: int
    """The number of optimizer steps of those weights."""

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.policy_version}"

    @classmethod
    def parse(cls, text: str) -> "WeightVersion":
        """The version that `text` names. Raises ValueError when it is not of the form `incarnation:version`."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not of the form incarnation:version")
        return cls(incarnation=int(found[1]), policy_version=int(found[2]))


class Generator(Protocol):
    """One engine, seen from the rollout. Every method raises GeneratorError when the engine is gone."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        """Samples one completion.

        Args:
            prompt_token_ids: [P] the whole prompt.
            sampling: how tokens are drawn.
            request_id: unique; names the request in `abort`.
            session_id: requests of one episode share it (prefix reuse, affinity).
            deadline_s: on `time.monotonic()`; past it the request is aborted and GeneratorError raised.
            min_policy_version: the completion's tokens are of this version or later.

        Raises:
            GeneratorError: the engine is gone, refused the request, or the deadline passed.
            ValueError: the prompt holds an id that the model does not know.
        """
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all: they return what they have, with finish_reason `abort`."""
        ...

    async def pause(self) -> None:
        """Stops decoding between two tokens; requests keep what they have and wait."""
        ...

    async def resume(self) -> None:
        """Goes on decoding."""
        ...

    async def update_weights(self, update: WeightUpdate, *, drain: bool, timeout_s: float) -> None:
        """Takes new weights.

        With `drain`, running requests end first and new ones wait; without, running requests go on with the new
        weights, their KV cache recomputed, and their tokens carry the version that wrote each.

        Raises:
            GeneratorError: not done within `timeout_s`, or refused; the generator is then of unknown version.
        """
        ...

    async def health(self) -> "GeneratorHealth":
        """How the engine stands. Raises GeneratorError when it does not answer."""
        ...

    async def close(self) -> None:
        """Gives up connections, and the server when this object started it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorHealth:
    """How an engine stands.

    >>> version = WeightVersion(incarnation=1, policy_version=0)
    >>> GeneratorHealth(version=version, num_running=3, num_queued=0, busy_s=1.5).num_running
    3
    """

    version: WeightVersion
    """The weights that it has."""
    num_running: int
    """Requests that are being decoded."""
    num_queued: int
    """Requests that wait for a place."""
    busy_s: float
    """Seconds since its start in which at least one request was being decoded."""
