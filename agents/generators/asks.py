"""`Ask`: one request at a pool, what it has got so far, and where from."""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Sequence

import numpy as np

from driftgym.agents.generators.members import Member, Tenant
from driftgym.agents.generators.traffic import PARKED
from driftgym.errors import GeneratorError
from driftgym.types import Completion, FinishReason, SamplingParams, float32_array, int32_array

_SEED_BYTES = 4
_MAX_SEED = 2**31 - 1


class Wait:
    """A wait that ends by its request's deadline, but for the time for which it stands still: the deadline moves."""

    def __init__(self, ask: "Ask", limit: asyncio.Timeout) -> None:
        """`limit` is what ends it; made in the context of whoever asked."""
        self._ask = ask
        self._limit = limit
        self._parked = PARKED.get()
        self._since_s: float | None = None
        self._is_over = False

    def stand_still(self, stands_still: bool) -> None:
        """Stops the clock, or lets it go on; nothing changes when it is so already."""
        if stands_still == (self._since_s is not None):
            return
        if self._parked is not None:
            self._parked.run(stands_still)
        now_s = time.monotonic()
        if self._since_s is not None:
            self._ask.deadline_s += now_s - self._since_s
        self._since_s = now_s if stands_still else None
        if not (self._is_over or self._limit.expired()):
            loop_s = asyncio.get_running_loop().time()
            self._limit.reschedule(None if stands_still else loop_s + self._ask.remaining_s)

    def end(self) -> None:
        """The wait is over, and its limit with it."""
        self._is_over = True
        self.stand_still(False)


class Ask:
    """A request between two slices: the tokens received, the deadline, the engines that are not to be asked again."""

    __slots__ = (
        "deadline_s",
        "error",
        "home",
        "is_aborted",
        "iteration",
        "last_version",
        "member",
        "min_policy_version",
        "num_empty",
        "num_in_iteration",
        "num_moved",
        "num_sent",
        "num_tokens",
        "order",
        "parts",
        "prompt_token_ids",
        "request_id",
        "sampling",
        "session_id",
        "shunned",
        "slow",
        "under_way",
        "wait",
        "waiter",
    )

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int,
        order: int,
    ) -> None:
        """As `Generator.generate`; `order` counts the requests of the pool as they arrive."""
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.request_id = request_id
        self.session_id = session_id
        self.deadline_s = deadline_s
        self.min_policy_version = min_policy_version
        self.order = order
        self.is_aborted = False
        """Somebody called `abort` for it."""
        self.parts: list[Completion] = []
        """What the slices gave, in order."""
        self.num_tokens = 0
        self.num_sent = 0
        """Slices that an engine was asked for, lost ones included."""
        self.num_moved = 0
        """Times that it went on at another engine than before."""
        self.num_empty = 0
        """Slices in a row that an engine ended by itself without a token."""
        self.last_version = 0
        """The version of its latest token."""
        self.iteration = -1
        """The iteration that `num_in_iteration` counts tokens of."""
        self.num_in_iteration = 0
        self.member: Member | None = None
        """Where it has a place."""
        self.home: Member | None = None
        """Where its latest token was written."""
        self.shunned: dict[Member, int] = {}
        """Engines that failed it since its latest token, each with the epoch that this was in."""
        self.slow: set[Member] = set()
        """Engines that were too slow for it."""
        self.error: GeneratorError | None = None
        """Why the latest slice failed; None once a token came after it."""
        self.under_way: Tenant | None = None
        """Its slice that an engine is writing."""
        self.waiter: asyncio.Future[Member] | None = None
        """Resolved with a place; None while it waits for none."""
        self.wait: Wait | None = None
        """The bound of that wait."""

    @property
    def remaining_s(self) -> float:
        """Until its deadline; below zero past it."""
        return self.deadline_s - time.monotonic()

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self.sampling.max_tokens - self.num_tokens

    @property
    def wire_id(self) -> str:
        """The id of the slice under way: an engine is never asked for two things under one id."""
        return self.request_id if self.num_sent <= 1 else f"{self.request_id}#{self.num_sent}"

    def prompt(self) -> Sequence[int]:
        """The prompt of the next slice: the request's own, and all tokens received."""
        if not self.num_tokens:
            return self.prompt_token_ids
        return [*self.prompt_token_ids, *(token_id for part in self.parts for token_id in part.token_ids.tolist())]

    def slice_sampling(self, num_tokens: int) -> SamplingParams:
        """How the next slice is drawn. With a seed, each slice has its own, made from it and the tokens so far."""
        sampling = self.sampling
        if num_tokens == sampling.max_tokens and not self.num_tokens:
            return sampling
        return dataclasses.replace(sampling, max_tokens=num_tokens, seed=_slice_seed(sampling.seed, self.num_tokens))

    def add(self, part: Completion, *, iteration: int) -> None:
        """Takes what a slice gave."""
        num_tokens = len(part.token_ids)
        if iteration != self.iteration:
            self.iteration, self.num_in_iteration = iteration, 0
        self.parts.append(part)
        self.num_tokens += num_tokens
        self.num_in_iteration += num_tokens
        if not num_tokens:
            return
        self.num_empty = 0
        self.last_version = int(part.policy_versions[-1])
        self.shunned.clear()
        self.error = None
        self.settle(self.member)

    def settle(self, home: Member | None) -> None:
        """Its latest token was written at `home`; with None it is bound to no engine."""
        before, self.home = self.home, home
        if before is home:
            return
        if home is not None:
            home.num_bound += 1
        if before is not None:
            before.num_bound -= 1
            before.note_empty()

    def shun(self, member: Member, error: GeneratorError) -> None:
        """It is not asked again before the next token, or before it came back."""
        self.shunned[member] = member.epoch
        self.error = error

    def shuns(self, member: Member) -> bool:
        """True when it is not to be asked."""
        return self.shunned.get(member) == member.epoch

    def completion(self, finish_reason: FinishReason) -> Completion:
        """All that it got, as one completion."""
        parts = self.parts
        if len(parts) == 1 and parts[0].request_id == self.request_id and parts[0].finish_reason == finish_reason:
            return parts[0]
        kv_versions = [part.kv_min_policy_version for part in parts if part.kv_min_policy_version is not None]
        return Completion(
            request_id=self.request_id,
            token_ids=int32_array(np.concatenate([part.token_ids for part in parts]) if parts else []),
            logprobs=float32_array(np.concatenate([part.logprobs for part in parts]) if parts else []),
            policy_versions=int32_array(np.concatenate([part.policy_versions for part in parts]) if parts else []),
            kv_min_policy_version=min(kv_versions, default=None),
            finish_reason=finish_reason,
            latency_s=sum(part.latency_s for part in parts),
            extras={
                **(parts[-1].extras if parts else {}),
                "num_slices": self.num_sent,
                "num_moved": self.num_moved,
            },
        )


def _slice_seed(seed: int | None, num_tokens: int) -> int | None:
    if seed is None or not num_tokens:
        return seed
    digest = hashlib.blake2b(f"{seed}:{num_tokens}".encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest) & _MAX_SEED
