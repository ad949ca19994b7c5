"""What the engine is asked, and what it answers. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from driftgym.types import FinishReason, Float32Array, Int32Array, SamplingParams, WeightKind

ABORTED = "aborted"
"""The message of a request that somebody ended."""
NOT_FINITE = "the logits are not finite"
"""The message of a request that these weights cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of output tokens that one version of the weights wrote.

    >>> VersionSpan(version="1:3", start=0, end=4).end
    4
    """

    version: str
    """The version's name."""
    start: int
    """The first output token of the span."""
    end: int
    """One past its last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What became of a request.

    >>> Answer(request_id="r", token_ids=np.array([5], np.int32), logprobs=np.array([-0.5], np.float32),
    ...        spans=(VersionSpan(version="1:0", start=0, end=1),), finish_reason="stop", matched=5, message=None,
    ...        num_prompt_tokens=3, num_cached_tokens=0, queue_s=0.0, latency_s=0.1, version="1:0",
    ...        kv_min_version=None).spans[0].version
    '1:0'
    """

    request_id: str
    """The request that it answers."""
    token_ids: Int32Array
    """[L] the sampled tokens, the matched stop token included."""
    logprobs: Float32Array
    """[L] the log-prob of each under the distribution that it was drawn from."""
    spans: tuple[VersionSpan, ...]
    """Which version wrote which tokens; they cover 0 to L."""
    finish_reason: FinishReason
    """Why it ended."""
    matched: int | None
    """The stop token, for `stop`."""
    message: str | None
    """What cut it short, for `abort`."""
    is_failure: bool = False
    """True when it was the engine itself that could not go on."""
    num_prompt_tokens: int
    """P."""
    num_cached_tokens: int
    """Prompt tokens whose KV was there when the request first got a slot."""
    queue_s: float
    """Seconds spent waiting for a slot, or paused."""
    latency_s: float
    """Seconds from the request's arrival to its end."""
    version: str
    """The weights at the end."""
    kv_min_version: str | None
    """The oldest version whose KV a token rests on, where that is older than the token's own; None elsewhere."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request while the engine has it; it changes as it moves between the queue and the slots.

    >>> Request(request_id="r", prompt_ids=np.array([1, 2], np.int32), sampling=SamplingParams(), seed=7,
    ...         on_finished=print, arrived_at=0.0).sequence.tolist()
    [1, 2]
    """

    request_id: str
    """Unique among the requests that the engine has."""
    prompt_ids: Int32Array
    """[P] the prompt."""
    sampling: SamplingParams
    """How tokens are drawn."""
    seed: int
    """Seed of its draws: the caller's, or one that the engine chose."""
    on_finished: Callable[[Answer], None]
    """Called once, by the engine's thread."""
    arrived_at: float
    """`time.monotonic()` at its arrival."""
    token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    """[L] what was sampled before the request last left its slot."""
    logprobs: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))
    """[L] their log-probs."""
    epochs: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    """[L] their epochs: the index of the weights among all that the engine has had."""
    stale_kv_epoch: int | None = None
    """The oldest epoch of KV that a token of a later epoch rested on."""
    waiting_since: float | None = None
    """`time.monotonic()` since when it waits; None while it has a slot."""
    queue_s: float = 0.0
    """Seconds that it has waited or been paused so far."""
    num_cached_tokens: int | None = None
    """As in `Answer`; None before the request first got a slot."""

    @property
    def sequence(self) -> Int32Array:
        """[P + L] the tokens whose KV the request needs."""
        return np.concatenate([self.prompt_ids, self.token_ids])

    def answer(
        self,
        reason: FinishReason,
        *,
        matched: int | None,
        message: str | None,
        versions: Sequence[str],
        now: float,
    ) -> Answer:
        """What became of it. `versions`: the names of the weights by epoch; `now`: on `time.monotonic()`."""
        stale = self.stale_kv_epoch
        return Answer(
            request_id=self.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=version_spans(self.epochs, versions),
            finish_reason=reason,
            matched=matched,
            message=message,
            is_failure=message == NOT_FINITE,
            num_prompt_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            queue_s=self.queue_s,
            latency_s=now - self.arrived_at,
            version=versions[-1],
            kv_min_version=None if stale is None else versions[stale],
        )

    def keep(self, token_ids: Int32Array, logprobs: Float32Array, epochs: Int32Array, kv_epoch: int) -> None:
        """Takes what was sampled so far out of a slot whose oldest KV is of `kv_epoch`."""
        self.token_ids, self.logprobs, self.epochs = token_ids, logprobs, epochs
        if len(epochs) and epochs[-1] > kv_epoch:
            self.stale_kv_epoch = min(kv_epoch, self.stale_kv_epoch if self.stale_kv_epoch is not None else kv_epoch)

    def start_waiting(self, now: float) -> None:
        """A wait begins, unless one is on already."""
        if self.waiting_since is None:
            self.waiting_since = now

    def stop_waiting(self, now: float) -> None:
        """Adds the wait that ends now."""
        if self.waiting_since is not None:
            self.queue_s += now - self.waiting_since
        self.waiting_since = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Given tokens whose log-probs are asked for.

    >>> ScoreRequest(request_id="s", token_ids=np.array([1, 2, 3], np.int32), start=0, on_finished=print,
    ...              arrived_at=0.0).start
    0
    """

    request_id: str
    """Unique among the requests that the engine has."""
    token_ids: Int32Array
    """[L] the whole sequence, at least two tokens."""
    start: int
    """The tokens after this one are scored; at most L - 2."""
    on_finished: "Callable[[ScoreAnswer], None]"
    """Called once, by the engine's thread."""
    arrived_at: float
    """`time.monotonic()` at its arrival."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreAnswer:
    """What became of a `ScoreRequest`.

    >>> ScoreAnswer(request_id="s", token_ids=np.array([1, 2, 3], np.int32), start=1,
    ...             logprobs=np.array([-0.5], np.float32), message=None, is_failure=False, num_cached_tokens=0,
    ...             latency_s=0.1, version="1:0").logprobs.tolist()
    [-0.5]
    """

    request_id: str
    """The request that it answers."""
    token_ids: Int32Array
    """[L] the whole sequence."""
    start: int
    """The tokens after this one are scored."""
    logprobs: Float32Array | None
    """[L - start - 1] of each scored token, given all before it, at temperature 1; None when it came to nothing."""
    message: str | None
    """Why it came to nothing."""
    is_failure: bool
    """True when it was the engine itself that could not."""
    num_cached_tokens: int
    """Tokens whose KV was there."""
    latency_s: float
    """Seconds from the request's arrival to its end."""
    version: str
    """The weights that scored them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrder:
    """Which weights an engine is to take.

    >>> WeightsOrder(folder=Path("weights/1-4"), version="1:4").kind
    'full'
    """

    folder: Path
    """Where they are."""
    version: str
    """Their name."""
    kind: WeightKind = "full"
    """`full`: every tensor of the model. `delta`: those that differ from `base_version`. `lora`: a peft adapter, put
    on the full weights `base_version` in the place of any adapter before."""
    base_version: str | None = None
    """What they are put on; None for `full`."""
    checksum: str | None = None
    """`sha256:` and the digest of the one weights file; None when it is not to be checked."""


def version_spans(epochs: NDArray[np.int32], versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """The runs of equal version among tokens of these epochs.

    >>> version_spans(np.array([0, 0, 1], np.int32), ["1:3", "1:5"])[1]
    VersionSpan(version='1:5', start=2, end=3)
    """
    starts = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist()] if len(epochs) else []
    ends = [*starts[1:], len(epochs)]
    return tuple(
        VersionSpan(version=versions[int(epochs[start])], start=start, end=end)
        for start, end in zip(starts, ends, strict=False)
    )
