"""`ToolAgent`: messages in, tokens out, through a generator. What was sampled is kept as it was sampled."""

from collections.abc import Sequence

import pydantic

from driftgym.agents.base import AgentTurn, OutOfTokensError
from driftgym.agents.context import TokenContext
from driftgym.agents.generators.base import Generator
from driftgym.agents.rendering import Renderer
from driftgym.config import Config
from driftgym.envs.tools import ToolSchema
from driftgym.errors import GeneratorError
from driftgym.types import Message, SamplingParams, int32_array


class AgentConfig(Config):
    """How the agent speaks."""

    renderer: str = pydantic.Field(
        "auto", description="`auto` goes by the model's files; or `compact`, `template`, a family of `renderers`."
    )
    temperature: float = pydantic.Field(1.0, ge=0, description="Divides the logits; above 0 for training.")
    top_p: float = pydantic.Field(1.0, gt=0, le=1, description="Nucleus; 1 for training.")
    max_tokens_per_turn: int = pydantic.Field(256, ge=1, description="Sampled tokens of one turn at most.")
    max_context_tokens: int = pydantic.Field(1024, ge=2, description="Prompt and answer together at most.")


class ToolAgent:
    """Implements `driftgym.agents.base.Agent` with one generator and one renderer for all conversations."""

    def __init__(self, generator: Generator, renderer: Renderer, config: AgentConfig) -> None:
        """The agent owns neither the generator nor the renderer."""
        self.generator = generator
        self.renderer = renderer
        self.config = config

    def start(self, *, session_id: str, tools: Sequence[ToolSchema]) -> "ToolConversation":
        """A new conversation with `tools` at hand. Its requests are `session_id`, a dash and the turn's number."""
        return ToolConversation(self, session_id=session_id, tools=tools)


class ToolConversation:
    """One episode of a `ToolAgent`."""

    def __init__(self, agent: ToolAgent, *, session_id: str, tools: Sequence[ToolSchema]) -> None:
        self._agent = agent
        self._session_id = session_id
        self._context = TokenContext(agent.renderer, tools)
        self._num_calls = 0

    async def act(self, messages: Sequence[Message], *, deadline_s: float, min_policy_version: int = 0) -> AgentTurn:
        """Answers `messages`. See `Conversation.act`.

        Consumes messages, waits for the generator, and gives the turn; the generator's answer, its deadline or a
        cancellation unblocks it.

        Raises:
            OutOfTokensError: the prompt leaves no room for an answer.
            GeneratorError: no generator answers, or the answer was cut short from outside.
        """
        agent = self._agent
        prompt = self._context.prompt(messages)
        completion = await agent.generator.generate(
            prompt.token_ids,
            self._sampling(num_prompt_tokens=len(prompt.token_ids)),
            request_id=f"{self._session_id}-{self._context.num_turns}",
            session_id=self._session_id,
            deadline_s=deadline_s,
            min_policy_version=min_policy_version,
        )
        if completion.finish_reason == "abort":
            raise GeneratorError(f"request {completion.request_id} was aborted")
        token_ids = completion.token_ids.tolist()
        action = agent.renderer.parse(token_ids, prompt_token_ids=prompt.token_ids, first_call_index=self._num_calls)
        self._context.add_turn(prompt, messages, token_ids, action)
        self._num_calls += len(action.tool_calls)
        return AgentTurn(
            new_prompt_token_ids=int32_array(prompt.new_token_ids),
            completion=completion,
            action=action,
            rewrites_context=prompt.rewrites_context,
        )

    def _sampling(self, *, num_prompt_tokens: int) -> SamplingParams:
        config = self._agent.config
        room = config.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise OutOfTokensError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room within {config.max_context_tokens}"
            )
        return SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=min(config.max_tokens_per_turn, room),
            stop_token_ids=self._agent.renderer.stop_token_ids,
        )
