"""`SamplingClient`: asks generators for completions and log-probs, beside any episode."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

from driftgym.agents.generators.base import Generator, Scores
from driftgym.agents.rendering import Renderer
from driftgym.config import Limits
from driftgym.envs.tools import ToolSchema
from driftgym.types import Completion, Message, SamplingParams

Prompt: TypeAlias = Sequence[int] | Sequence[Message]
_T = TypeVar("_T")


class SamplingClient:
    """Samples and scores with the weights that a generator has; every token says which ones.

    Each call begins at once and returns a future; calls run beside each other. A future that is cancelled ends its
    requests.
    """

    def __init__(self, generator: Generator, *, renderer: Renderer | None = None, limits: Limits | None = None) -> None:
        """Asks nothing yet.

        Args:
            generator: one engine, or a `GeneratorPool`; whoever made it closes it.
            renderer: turns messages into token ids; None: prompts are token ids.
            limits: its `generation_s` bounds each request; None takes the defaults.
        """
        self._generator = generator
        self._renderer = renderer
        self._limits = limits or Limits()
        self._tasks: set[asyncio.Task[Any]] = set()

    def sample(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        tools: Sequence[ToolSchema] = (),
        min_policy_version: int = 0,
    ) -> asyncio.Future[list[Completion]]:
        """`n` completions of one prompt.

        Args:
            prompt: [P] token ids; or messages, which are rendered up to where the assistant's next tokens begin.
            sampling: how tokens are drawn; None takes the defaults. With a seed, completion i is drawn with seed + i.
                Completions of messages end at the renderer's stop tokens unless it names others.
            n: how many.
            tools: told to the model along with messages.
            min_policy_version: every token is of this version or later.

        Raises:
            GeneratorError: no generator answered in time.
            ValueError: the prompt is empty, holds an unknown id, or is messages and there is no renderer; n is below 1.
        """
        return self._begin(self._sample(prompt, sampling or SamplingParams(), n, tools, min_policy_version))

    def score(self, token_ids: Sequence[int], *, num_given: int = 1) -> asyncio.Future[Scores]:
        """The log-probs of `token_ids` from position `num_given` on, at temperature 1.

        Args:
            token_ids: [L] a whole sequence.
            num_given: at least 1; so many tokens at its start are not scored.

        Raises:
            GeneratorError: no generator answered in time.
            ValueError: an unknown id, or nothing to score.
        """
        return self._begin(self._generator.score(token_ids, num_given=num_given, deadline_s=self._deadline_s()))

    async def _sample(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        tools: Sequence[ToolSchema],
        min_policy_version: int,
    ) -> list[Completion]:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        token_ids, sampling = self._rendered(prompt, sampling, tools)
        session_id, deadline_s = uuid.uuid4().hex, self._deadline_s()
        requests = [
            asyncio.create_task(
                self._generator.generate(
                    token_ids,
                    _with_seed_of(sampling, index),
                    request_id=f"{session_id}-{index}",
                    session_id=session_id,
                    deadline_s=deadline_s,
                    min_policy_version=min_policy_version,
                )
            )
            for index in range(n)
        ]
        try:
            return list(await asyncio.gather(*requests))
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    def _rendered(
        self, prompt: Prompt, sampling: SamplingParams, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], SamplingParams]:
        messages = [part for part in prompt if isinstance(part, Message)]
        if not messages:
            return [int(token_id) for token_id in prompt if not isinstance(token_id, Message)], sampling
        if self._renderer is None or len(messages) != len(prompt):
            raise ValueError("a prompt of messages, and of nothing else, goes with a renderer: SamplingClient has none")
        stops = sampling.stop_token_ids or self._renderer.stop_token_ids
        return self._renderer.first_prompt(messages, tools), dataclasses.replace(sampling, stop_token_ids=stops)

    def _deadline_s(self) -> float:
        return time.monotonic() + self._limits.generation_s

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Future[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _with_seed_of(sampling: SamplingParams, index: int) -> SamplingParams:
    return sampling if sampling.seed is None else dataclasses.replace(sampling, seed=sampling.seed + index)
