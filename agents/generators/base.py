"""The contract of a generator, and the name that versions of weights have on the wire."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from driftgym.types import Completion, Float32Array, SamplingParams, WeightUpdate

_VERSION = re.compile(r"([0-9]+):([0-9]+)")

WeightUpdateMode = Literal["drain", "abort_resume", "in_flight"]
"""What becomes of running requests when new weights come: see `Generator.update_weights`."""


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

    async def score(self, token_ids: Sequence[int], *, num_given: int, deadline_s: float) -> "Scores":
        """The model's log-probs of `token_ids` from position `num_given` on, at temperature 1. Samples nothing.

        Args:
            token_ids: [L] a whole sequence.
            num_given: at least 1; so many tokens at its start are not scored.
            deadline_s: on `time.monotonic()`.

        Raises:
            GeneratorError: the engine is gone, refused, or the deadline passed.
            ValueError: an id that the model does not know, or nothing to score.
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

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """Takes new weights; every token carries the version that wrote it.

        Args:
            update: where they are.
            mode: `drain`: running requests end with the old weights first, new ones wait. `abort_resume`: running
                requests end at once with what they have, finish_reason `abort`; whoever asked goes on with it.
                `in_flight`: running requests go on with the new weights between two tokens.
            keep_kv: with `in_flight` alone: the KV cache is kept instead of recomputed; completions that rest on it
                name its version in `kv_min_policy_version`.
            timeout_s: bounds it all.

        Raises:
            GeneratorError: not done within `timeout_s`, or refused; the generator is then of unknown version.
        """
        ...

    async def health(self) -> "GeneratorHealth":
        """How the engine stands. Raises GeneratorError when it does not answer."""
        ...

    async def load(self) -> "GeneratorLoad":
        """How much the engine has to do. Raises GeneratorError when it does not answer."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLoad:
    """How much an engine has to do.

    >>> GeneratorLoad(num_running=3, num_queued=0).num_running
    3
    """

    num_running: int
    """Requests that are being decoded."""
    num_queued: int
    """Requests that wait for a place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probs of given tokens.

    >>> import numpy as np
    >>> Scores(logprobs=np.array([-0.5], np.float32), version=WeightVersion(incarnation=1, policy_version=4)).version
    WeightVersion(incarnation=1, policy_version=4)
    """

    logprobs: Float32Array
    """[L - num_given] of each scored token, given all before it, at temperature 1."""
    version: WeightVersion
    """The weights that scored them."""
