"""Answers that think too long: interrupted by a text that nobody sampled, and gone on with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgym.agents.episode import EpisodeId
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.agents.generators.traffic import PARKED, Stopwatch
from driftgym.agents.interruption import Interruption
from driftgym.agents.library_renderer import LibraryRenderer
from driftgym.agents.rendering import Renderer
from driftgym.agents.rollout import EpisodeOptions, RolloutConfig, run_episode
from driftgym.agents.template_renderer import TemplateRenderer
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError, GeneratorError
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryStatus

TOOL = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {}}})
USER = Message(role="user", content="Go.")
ADD = '<tool_call>{"name":"add","arguments":{"a":4,"b":1}}</tool_call>'
THOUGHT = "<think>one and one and"
TEXT = "\nEnough.</think>"
LIMITS = Limits(tool_call_s=1.0, generation_s=5.0, episode_s=20.0)
Encode = Callable[[str], list[int]]


class Stage:
    """An agent that is interrupted as soon as it has written THOUGHT, unless told otherwise."""

    def __init__(self, compact: Renderer, encode: Encode, generator_type: Any, env_type: Any) -> None:
        self.compact = compact
        self.encode = encode
        self.generator_type = generator_type
        self.env = env_type(limits=LIMITS)
        self.stop = compact.stop_token_ids[0]
        self.thought = encode(THOUGHT)
        self.forced = encode(TEXT)
        self.generator: Any = None

    def agent(self, script: Sequence[Any], **config: Any) -> ToolAgent:
        self.generator = self.generator_type(self.encode, self.stop, list(script))
        return self.on(self.generator, **config)

    def on(self, generator: Any, **config: Any) -> ToolAgent:
        settings = {"interrupt_after_tokens": len(self.thought), "interrupt_text": TEXT, **config}
        return ToolAgent(generator, self.compact, AgentConfig(**settings))

    async def play(self, agent: ToolAgent, task: Task, *, max_turns: int = 4) -> Trajectory:
        options = EpisodeOptions(limits=LIMITS, config=RolloutConfig(max_turns=max_turns))
        return await run_episode(self.env, agent, task, episode_id=EpisodeId(group_id="g", member=0), options=options)

    def completion(self, ids: list[int], *, version: int = 0, reason: Any = "length", **fields: Any) -> Completion:
        logprobs = -np.arange(1, len(ids) + 1) / 8 - version
        return Completion(
            request_id="r",
            token_ids=ids,
            logprobs=logprobs,
            policy_versions=np.full(len(ids), version),
            finish_reason=reason,
            **fields,
        )


@pytest.fixture
def stage(compact: Renderer, encode_tiny: Encode, generator_type: Any, env_type: Any) -> Stage:
    return Stage(compact, encode_tiny, generator_type, env_type)


async def test_the_text_follows_what_was_sampled_and_the_model_goes_on(stage: Stage, soon: Any) -> None:
    agent = stage.agent([f"{THOUGHT}...", "2"], max_tokens_per_turn=50, temperature=0.7)
    turn = await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon(), min_policy_version=2)
    first, second = stage.generator.requests
    assert first["prompt"] == stage.compact.first_prompt([USER], [TOOL])
    assert second["prompt"] == [*first["prompt"], *stage.thought, *stage.forced]
    assert (first["id"], second["id"]) == ("s-0", "s-0.1")
    assert (first["min"], second["min"]) == (2, 2)
    assert first["sampling"].max_tokens == len(stage.thought)
    assert second["sampling"].max_tokens == 50 - len(stage.thought)
    assert second["sampling"].temperature == 0.7
    assert second["sampling"].stop_token_ids == stage.compact.stop_token_ids
    assert turn.new_prompt_token_ids.tolist() == stage.forced
    assert turn.completion.token_ids.tolist() == [*stage.encode("2"), stage.stop]
    assert turn.action == Message(role="assistant", content="2", reasoning="one and one and\nEnough.")
    assert turn.interrupted is not None
    assert turn.interrupted.new_prompt_token_ids.tolist() == first["prompt"]
    assert turn.interrupted.completion.token_ids.tolist() == stage.thought
    assert turn.interrupted.action == Message(role="assistant")


async def test_the_time_of_an_interrupted_answer_is_that_of_both_requests(stage: Stage, soon: Any) -> None:
    parts = (
        stage.completion(stage.thought, latency_s=2.0),
        stage.completion([stage.stop], reason="stop", latency_s=0.5),
    )
    turn = await stage.agent(parts).start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert turn.latency_s == 2.5


async def test_each_part_is_recorded_with_its_own_log_probs_and_versions(stage: Stage, task: Task) -> None:
    after = [*stage.encode("2"), stage.stop]
    parts = (
        stage.completion(stage.thought, version=3, kv_min_policy_version=1),
        stage.completion(after, version=5, reason="stop"),
    )
    trajectory = await stage.play(stage.agent(parts), task)
    assert trajectory.status is TrajectoryStatus.COMPLETED
    begun, ended = trajectory.turns
    assert [begun.completion, ended.completion] == list(parts)
    assert (begun.is_interrupted, ended.is_interrupted) == (True, False)
    assert (begun.action, begun.observation, begun.reward) == (Message(role="assistant"), (), 0.0)
    assert ended.action.text == "2"
    assert not ended.rewrites_context
    assert (trajectory.num_turns, trajectory.num_sampled_tokens) == (1, len(stage.thought) + len(after))
    assert trajectory.min_policy_version == 3
    assert trajectory.events["interrupted"] == 1


async def test_of_two_tool_turns_one_is_interrupted_and_every_prompt_begins_with_all_before(
    stage: Stage, task: Task
) -> None:
    agent = stage.agent([f"{THOUGHT}...", ADD, ADD, "5"], max_tokens_per_turn=64)
    trajectory = await stage.play(agent, task)
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert [turn.is_interrupted for turn in trajectory.turns] == [True, False, False, False]
    assert trajectory.num_turns == 3
    assert trajectory.events["interrupted"] == 1
    assert stage.env.counts["add"] == 2
    assert [message.text for message in trajectory.turns[1].observation] == ["5"]
    assert [turn.action.tool_calls[0].call_id for turn in trajectory.turns[1:3]] == ["call_0", "call_1"]
    whole: list[int] = []
    for turn, request in zip(trajectory.turns, stage.generator.requests, strict=True):
        whole += turn.new_prompt_token_ids.tolist()
        assert request["prompt"] == whole
        whole += turn.completion.token_ids.tolist()


async def test_interruptions_do_not_use_up_turns(stage: Stage, task: Task) -> None:
    agent = stage.agent([f"{THOUGHT}...", ADD] * 2, max_tokens_per_turn=64)
    trajectory = await stage.play(agent, task, max_turns=2)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TURNS
    assert (trajectory.num_turns, len(trajectory.turns)) == (2, 4)
    assert trajectory.events["interrupted"] == 2


async def test_a_call_that_the_interruption_breaks_is_answered_by_an_error(stage: Stage, task: Task) -> None:
    begun = '<tool_call>{"name":'
    agent = stage.agent(
        [f"{begun}...", ADD, "5"], interrupt_after_tokens=len(stage.encode(begun)), max_tokens_per_turn=64
    )
    trajectory = await stage.play(agent, task)
    broken, added = trajectory.turns[1].observation
    assert broken.text.startswith("error:")
    assert (added.tool_call_id, added.text) == ("call_1", "5")
    assert stage.env.counts["add"] == 1


async def test_an_answer_that_uses_up_the_rest_too_is_cut(stage: Stage, task: Task) -> None:
    trajectory = await stage.play(stage.agent([f"{THOUGHT}...", "so..."]), task)
    assert trajectory.status is TrajectoryStatus.TRUNCATED_TOKENS
    assert (trajectory.events["interrupted"], trajectory.events["completion_cut"]) == (1, 1)
    assert [turn.observation for turn in trajectory.turns] == [(), ()]
    assert trajectory.turns[1].action.text == "so"


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ("whole call", "length"),
        ("stop as the last", "stop"),
        ("stop as the last", "length"),
        ("the engine's own limit", "length"),
        ("the engine's own end", "stop"),
    ],
)
async def test_an_answer_that_has_ended_is_not_interrupted(stage: Stage, soon: Any, ids: str, reason: str) -> None:
    call = stage.encode(ADD)
    answers = {
        "whole call": call,
        "stop as the last": [*call[:-1], stage.stop],
        "the engine's own limit": call[:-1],
        "the engine's own end": [*call[:-1], call[1]],
    }
    agent = stage.agent([stage.completion(answers[ids], reason=reason)], interrupt_after_tokens=len(call))
    turn = await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert turn.interrupted is None
    assert turn.completion.token_ids.tolist() == answers[ids]
    assert len(stage.generator.requests) == 1


@pytest.mark.parametrize("num_before", [0, 1])
async def test_an_abort_is_no_interruption(stage: Stage, soon: Any, num_before: int) -> None:
    whole = [stage.completion(stage.thought)] * num_before
    agent = stage.agent([*whole, stage.completion(stage.thought, reason="abort")])
    with pytest.raises(GeneratorError, match="aborted"):
        await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert len(stage.generator.requests) == num_before + 1


async def test_by_default_nothing_is_interrupted(stage: Stage, soon: Any) -> None:
    agent = ToolAgent(stage.generator_type(stage.encode, stage.stop, [f"{THOUGHT}..."]), stage.compact, AgentConfig())
    turn = await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert turn.interrupted is None
    assert agent.generator.requests[0]["sampling"].max_tokens == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk_tokens", [None, 1, 3, 100])
async def test_slices_of_an_answer_are_not_its_budget(stage: Stage, task: Task, chunk_tokens: int | None) -> None:
    after = [*stage.encode(ADD), stage.stop]
    answer = [*stage.thought, *stage.forced, *after]
    last = [*stage.encode("5"), stage.stop]
    num_first = len(stage.compact.first_prompt([Message(role="user", content="add 4 and 1")], stage.env.tools))

    def script(request: ScriptedRequest) -> Sequence[int]:
        """The answer from where the prompt ends in it; after the tool has answered, the last words."""
        prompt = list(request.prompt_token_ids)
        assert prompt[num_first:][: len(answer)] == answer[: len(prompt) - num_first]
        rest = answer[len(prompt) - num_first :]
        num_second = num_first + len(answer) + num_reply
        return rest or last[max(0, len(prompt) - num_second) :]

    reply = stage.compact.next_prompt(
        prompt_token_ids=[0],
        completion_token_ids=[stage.stop],
        conversation=[],
        new_messages=[Message(role="tool", content="5", tool_call_id="call_0", name="add")],
        tools=stage.env.tools,
    )
    num_reply = len(reply or ())
    pool = GeneratorPool([ScriptedGenerator(script)], policy_version=0, chunk_tokens=chunk_tokens)
    try:
        trajectory = await stage.play(stage.on(pool, max_tokens_per_turn=64), task)
    finally:
        await pool.close()
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert [turn.completion.token_ids.tolist() for turn in trajectory.turns] == [stage.thought, after, last]
    assert trajectory.events["interrupted"] == 1
    assert trajectory.turns[1].observation[0].text == "5"


async def test_time_that_the_first_request_was_parked_is_given_to_the_second(stage: Stage, soon: Any) -> None:
    class Parked:
        """Answers as the script does; each request is parked once."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.deadlines: list[float] = []

        async def generate(self, *words: Any, deadline_s: float, **options: Any) -> Completion:
            self.deadlines.append(deadline_s)
            watch = PARKED.get()
            assert watch is not None
            watch.run(True)
            completion: Completion = await self.inner.generate(*words, deadline_s=deadline_s, **options)
            watch.run(False)
            return completion

    inner = stage.generator_type(stage.encode, stage.stop, [f"{THOUGHT}...", "2"], delay_s=0.01)
    generator, watch = Parked(inner), Stopwatch()
    token = PARKED.set(watch)
    try:
        deadline_s = soon()
        await stage.on(generator).start(session_id="s", tools=[TOOL]).act([USER], deadline_s=deadline_s)
    finally:
        PARKED.reset(token)
    assert generator.deadlines[0] == deadline_s
    assert deadline_s < generator.deadlines[1] < deadline_s + watch.seconds


@pytest.mark.parametrize(("spare", "second"), [(-1, None), (0, None), (1, 1), (4, 4), (500, 36)])
async def test_the_context_limit_holds_on_both_sides(stage: Stage, soon: Any, spare: int, second: int | None) -> None:
    """`spare` is what the prompt, the thought and the text leave of the context."""
    num_used = len(stage.compact.first_prompt([USER], [TOOL])) + len(stage.thought) + len(stage.forced)
    num_max = len(stage.thought) + 36
    script = [f"{THOUGHT}...", ADD]
    agent = stage.agent(script, max_context_tokens=num_used + spare, max_tokens_per_turn=num_max)
    turn = await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    budgets = [request["sampling"].max_tokens for request in stage.generator.requests]
    if second is None:
        assert turn.interrupted is None
        assert budgets == [min(num_max, len(stage.thought) + len(stage.forced) + spare)]
    else:
        assert budgets == [len(stage.thought), second]


@given(
    after_tokens=st.integers(1, 20),
    num_forced=st.integers(1, 20),
    num_more=st.integers(1, 20),
    room=st.integers(1, 80),
)
def test_no_budget_is_exceeded(after_tokens: int, num_forced: int, num_more: int, room: int) -> None:
    max_tokens = after_tokens + num_more
    interruption = Interruption(after_tokens=after_tokens, token_ids=tuple(range(num_forced)))
    budget = interruption.budget(max_tokens=max_tokens, room=room)
    assert budget.first + budget.rest <= max_tokens
    if budget.rest:
        assert budget.first == after_tokens
        assert budget.first + num_forced + budget.rest <= room
        assert budget.first + budget.rest == max_tokens or budget.first + num_forced + budget.rest == room
    else:
        assert budget.first == min(max_tokens, room)
        assert after_tokens + num_forced + 1 > room


NOT_THINKING = [
    ("so it is", "\nEnough."),  # nothing was opened
    ("<think>a</think>so it", "\nEnough."),  # closed
    ("<think>a</think>", "\nEnough."),  # just closed
    ("<think>a</think>b<think>c", TEXT),  # opened again
    ("<think>", TEXT),
]


@pytest.mark.parametrize(("begun", "forced"), NOT_THINKING)
async def test_a_block_is_closed_only_where_one_is_open(stage: Stage, soon: Any, begun: str, forced: str) -> None:
    agent = stage.agent([f"{begun}...", "2"], interrupt_after_tokens=len(stage.encode(begun)))
    await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    first, second = stage.generator.requests
    assert second["prompt"] == [*first["prompt"], *stage.encode(begun), *stage.encode(forced)]


@pytest.mark.parametrize(
    ("text", "outside"),
    [("</think>1", "1"), (AgentConfig().interrupt_text, "\n\nTime is up: I answer now.\n\n"), ("x", "x")],
)
async def test_what_is_left_of_a_text_without_its_tag(stage: Stage, soon: Any, text: str, outside: str) -> None:
    agent = stage.agent(["soon...", "2"], interrupt_text=text, interrupt_after_tokens=len(stage.encode("soon")))
    turn = await agent.start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert turn.new_prompt_token_ids.tolist() == stage.encode(outside)


async def test_a_text_that_is_the_tag_alone_puts_nothing_where_nobody_thinks(stage: Stage, task: Task) -> None:
    """The answer goes on as it was, in two requests."""
    num_tokens = len(stage.encode("soon"))
    agent = stage.agent(["soon...", "2"], interrupt_text="</think>", interrupt_after_tokens=num_tokens)
    trajectory = await stage.play(agent, task)
    assert [turn.new_prompt_token_ids.tolist() for turn in trajectory.turns[1:]] == [[]]
    assert trajectory.turns[1].action.text == "soon2"


@pytest.mark.parametrize(("prompt", "opens"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
@pytest.mark.parametrize("are_tokens", [True, False])
async def test_what_the_template_opens_or_closes_counts(
    toy_tokenizer: Any, generator_type: Any, soon: Any, *, prompt: str, opens: bool, are_tokens: bool
) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]" + prompt + "{% endif %}"
    )
    tokenizer = toy_tokenizer(template, plain=("<think>", "</think>") if are_tokens else ())
    generator = generator_type(tokenizer.encode, tokenizer.eos_token_id, ["add of add...", "add"])
    config = AgentConfig(interrupt_after_tokens=len(tokenizer.encode("add of add")), interrupt_text="of</think>add")
    agent = ToolAgent(generator, TemplateRenderer(tokenizer), config)
    user = Message(role="user", content="<think>")
    turn = await agent.start(session_id="s", tools=()).act([user], deadline_s=soon())
    assert turn.new_prompt_token_ids.tolist() == tokenizer.encode("of</think>add" if opens else "ofadd")


async def test_a_block_that_the_prompt_opened_is_closed_by_the_text(
    toy_tokenizer: Any, generator_type: Any, soon: Any
) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    tokenizer = toy_tokenizer(template, plain=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    renderer = TemplateRenderer(tokenizer)
    generator = generator_type(tokenizer.encode, tokenizer.eos_token_id, ["add of add...", ADD])
    config = AgentConfig(interrupt_after_tokens=len(tokenizer.encode("add of add")))
    turn = await ToolAgent(generator, renderer, config).start(session_id="s", tools=()).act([USER], deadline_s=soon())
    assert turn.action.reasoning == "add of add\n\nTime is up: I answer now."
    assert [call.name for call in turn.action.tool_calls] == ["add"]
    assert turn.action.content == ""


async def test_a_template_that_drops_the_thinking_starts_anew_after_an_interrupted_answer(
    toy_tokenizer: Any, generator_type: Any, soon: Any
) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\n') }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = toy_tokenizer(template, plain=("<think>", "</think>"))
    generator = generator_type(tokenizer.encode, tokenizer.eos_token_id, ["<think>add...", "Here.", "Short."])
    config = AgentConfig(interrupt_after_tokens=len(tokenizer.encode("<think>add")))
    conversation = ToolAgent(generator, TemplateRenderer(tokenizer), config).start(session_id="s", tools=())
    first = await conversation.act([USER], deadline_s=soon())
    second = await conversation.act([Message(role="user", content="again, shorter")], deadline_s=soon())
    assert first.interrupted is not None
    assert not first.rewrites_context
    assert second.rewrites_context
    assert second.interrupted is None
    text = tokenizer.decode(generator.requests[2]["prompt"])
    assert text == "[user]Go.<eot>\n[assistant]Here.<eot>\n[user]again, shorter<eot>\n[assistant]"


def test_each_renderer_reads_the_tags_of_a_text_as_tokens(
    compact: Renderer, encode_tiny: Encode, qwen3_tokenizer: Any, toy_tokenizer: Any
) -> None:
    text = "\nstop</think>\n\n<tool_call>"
    assert compact.encode_text(text) == encode_tiny(text)
    qwen3 = LibraryRenderer(qwen3_tokenizer, "qwen3").encode_text(text)
    assert qwen3 == qwen3_tokenizer.encode(text)
    assert qwen3_tokenizer.convert_tokens_to_ids("</think>") in qwen3
    plain = toy_tokenizer("{% for m in messages %}{{ m['content'] }}<eot>\n{% endfor %}", plain=("</think>",))
    assert plain.convert_tokens_to_ids("</think>") in TemplateRenderer(plain).encode_text(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interrupt_text": "Stop.<|im_end|>"}, "agent.interrupt_text: .*a token that ends a turn"),
        ({"max_context_tokens": 20}, "agent.interrupt_text: .*agent.max_context_tokens 20; that takes at least"),
    ],
)
def test_an_interruption_that_cannot_work_is_refused(stage: Stage, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage.agent(["5"], **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interrupt_after_tokens": 16, "max_tokens_per_turn": 16}, "16 must be below max_tokens_per_turn 16"),
        ({"interrupt_after_tokens": 0}, "greater than or equal to 1"),
        ({"interrupt_text": ""}, "at least 1 character"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        AgentConfig(**settings)
