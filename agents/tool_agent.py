"""`ToolAgent`: messages in, tokens out, through a generator. What was sampled is kept as it was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pydantic

from driftgym.agents.base import AgentTurn, OutOfTokensError
from driftgym.agents.context import Prompt, TokenContext
from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.traffic import PARKED
from driftgym.agents.interruption import AnswerBudget, Interruption, has_whole_call, is_thinking, make_interruption
from driftgym.agents.rendering import Renderer
from driftgym.config import Config
from driftgym.envs.tools import ToolSchema
from driftgym.errors import GeneratorError
from driftgym.types import Completion, Message, SamplingParams, int32_array


class AgentConfig(Config):
    """How the agent speaks."""

    renderer: str = pydantic.Field(
        "auto", description="`auto` goes by the model's files; or `compact`, `template`, a family of `renderers`."
    )
    temperature: float = pydantic.Field(1.0, ge=0, description="Divides the logits; above 0 for training.")
    top_p: float = pydantic.Field(1.0, gt=0, le=1, description="Nucleus; 1 for training.")
    max_tokens_per_turn: int = pydantic.Field(256, ge=1, description="Sampled tokens of one turn at most.")
    max_context_tokens: int = pydantic.Field(1024, ge=2, description="Prompt and answer together at most.")
    interrupt_after_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="An answer of so many sampled tokens that has not ended is interrupted, and goes on; null: never.",
    )
    interrupt_text: str = pydantic.Field(
        "\n\nTime is up: I answer now.\n</think>\n\n",
        min_length=1,
        description="What is put in the context then; never trained. `</think>` in it is left out where no thinking "
        "block is open.",
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        after = self.interrupt_after_tokens
        if after is not None and after >= self.max_tokens_per_turn:
            raise ValueError(
                f"interrupt_after_tokens {after} must be below max_tokens_per_turn {self.max_tokens_per_turn}, which "
                "counts the tokens before and after the interruption"
            )
        return self


def interruption_of(config: AgentConfig, renderer: Renderer) -> Interruption | None:
    """How answers are interrupted for their length; None when they are not. Raises ConfigError when they cannot be."""
    if config.interrupt_after_tokens is None:
        return None
    return make_interruption(
        renderer,
        after_tokens=config.interrupt_after_tokens,
        text=config.interrupt_text,
        max_context_tokens=config.max_context_tokens,
    )


class ToolAgent:
    """Implements `driftgym.agents.base.Agent` with one generator and one renderer for all conversations."""

    def __init__(self, generator: Generator, renderer: Renderer, config: AgentConfig) -> None:
        """The agent owns neither the generator nor the renderer. Raises ConfigError: see `make_interruption`."""
        self.generator = generator
        self.renderer = renderer
        self.config = config
        self.interruption = interruption_of(config, renderer)

    def start(self, *, session_id: str, tools: Sequence[ToolSchema]) -> "ToolConversation":
        """A new conversation with `tools` at hand.

        Its requests are `session_id`, a dash and the turn's number; what follows an interruption has `.1` after that.
        """
        return ToolConversation(self, session_id=session_id, tools=tools)

    def budget(self, *, num_prompt_tokens: int) -> AnswerBudget:
        """What an answer to a prompt of that length may have. Raises OutOfTokensError when it may have nothing."""
        config = self.config
        room = config.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise OutOfTokensError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room within {config.max_context_tokens}"
            )
        if self.interruption is None:
            return AnswerBudget(first=min(config.max_tokens_per_turn, room))
        return self.interruption.budget(max_tokens=config.max_tokens_per_turn, room=room)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What bounds the requests of one turn.

    >>> _Limits(deadline_s=9.0, min_policy_version=2).min_policy_version
    2
    """

    deadline_s: float
    """On `time.monotonic()`."""
    min_policy_version: int
    """Their tokens are of this version or later."""


class ToolConversation:
    """One episode of a `ToolAgent`."""

    def __init__(self, agent: ToolAgent, *, session_id: str, tools: Sequence[ToolSchema]) -> None:
        self._agent = agent
        self._session_id = session_id
        self._context = TokenContext(agent.renderer, tools)
        self._num_calls = 0

    async def act(self, messages: Sequence[Message], *, deadline_s: float, min_policy_version: int = 0) -> AgentTurn:
        """Answers `messages`. See `Conversation.act`.

        Consumes messages, waits for the generator, a second time where the answer is interrupted, and gives the turn;
        the generator's answer, its deadline or a cancellation unblocks it.

        Raises:
            OutOfTokensError: the prompt leaves no room for an answer.
            GeneratorError: no generator answers, or the answer was cut short from outside.
        """
        prompt = self._context.prompt(messages)
        budget = self._agent.budget(num_prompt_tokens=len(prompt.token_ids))
        parked_before_s = _parked_s()
        limits = _Limits(deadline_s=deadline_s, min_policy_version=min_policy_version)
        completion = await self._sample(prompt.token_ids, budget.first, limits)
        turn = self._turn(prompt, completion)
        if budget.rest and budget.is_used_up(completion) and not self._has_ended(turn):
            # What the first request stood still through nobody's fault is not taken from the second.
            later_s = deadline_s + _parked_s() - parked_before_s
            limits = _Limits(deadline_s=later_s, min_policy_version=min_policy_version)
            turn = await self._go_on(prompt, turn, budget, limits)
        self._context.add_turn(prompt, messages, _answer_ids(turn), turn.action)
        self._num_calls += len(turn.action.tool_calls)
        return turn

    async def _go_on(self, prompt: Prompt, turn: AgentTurn, budget: AnswerBudget, limits: _Limits) -> AgentTurn:
        """`turn`, interrupted, and what the model says then."""
        assert self._agent.interruption is not None  # the budget has a rest
        so_far = turn.completion.token_ids.tolist()
        forced = self._agent.interruption.forced(
            is_thinking=is_thinking(
                self._agent.renderer, turn.action, prompt_token_ids=prompt.token_ids, sampled_token_ids=so_far
            )
        )
        begun = [*so_far, *forced]
        completion = await self._sample([*prompt.token_ids, *begun], budget.rest, limits, suffix=".1")
        return AgentTurn(
            new_prompt_token_ids=int32_array(forced),
            completion=completion,
            action=self._parse(prompt, [*begun, *completion.token_ids.tolist()]),
            rewrites_context=False,
            interrupted=_without_action(turn),
        )

    async def _sample(
        self, token_ids: Sequence[int], max_tokens: int, limits: _Limits, *, suffix: str = ""
    ) -> Completion:
        agent = self._agent
        completion = await agent.generator.generate(
            token_ids,
            SamplingParams(
                temperature=agent.config.temperature,
                top_p=agent.config.top_p,
                max_tokens=max_tokens,
                stop_token_ids=agent.renderer.stop_token_ids,
            ),
            request_id=f"{self._session_id}-{self._context.num_turns}{suffix}",
            session_id=self._session_id,
            deadline_s=limits.deadline_s,
            min_policy_version=limits.min_policy_version,
        )
        if completion.finish_reason == "abort":
            raise GeneratorError(f"request {completion.request_id} was aborted")
        return completion

    def _turn(self, prompt: Prompt, completion: Completion) -> AgentTurn:
        return AgentTurn(
            new_prompt_token_ids=int32_array(prompt.new_token_ids),
            completion=completion,
            action=self._parse(prompt, completion.token_ids.tolist()),
            rewrites_context=prompt.rewrites_context,
        )

    def _parse(self, prompt: Prompt, token_ids: list[int]) -> Message:
        return self._agent.renderer.parse(
            token_ids, prompt_token_ids=prompt.token_ids, first_call_index=self._num_calls
        )

    def _has_ended(self, turn: AgentTurn) -> bool:
        """True for a whole call, and for a stop token that came as the last one: some engines call that `length`."""
        return has_whole_call(turn.action) or turn.completion.token_ids[-1] in self._agent.renderer.stop_token_ids


def _answer_ids(turn: AgentTurn) -> list[int]:
    """[L] all that follows the prompt of the answer: what was sampled, and what was forced among it."""
    sampled: list[int] = turn.completion.token_ids.tolist()
    if turn.interrupted is None:
        return sampled
    return [*turn.interrupted.completion.token_ids.tolist(), *turn.new_prompt_token_ids.tolist(), *sampled]


def _without_action(turn: AgentTurn) -> AgentTurn:
    return AgentTurn(
        new_prompt_token_ids=turn.new_prompt_token_ids,
        completion=turn.completion,
        action=Message(role="assistant"),
        rewrites_context=turn.rewrites_context,
    )


def _parked_s() -> float:
    """Seconds so far in which requests of this context were parked."""
    watch = PARKED.get()
    return 0.0 if watch is None else watch.seconds
