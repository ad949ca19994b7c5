from collections.abc import Callable
from typing import Any

import pytest

from driftgym.agents.base import OutOfTokensError
from driftgym.agents.rendering import Renderer
from driftgym.agents.template_renderer import TemplateRenderer
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.envs.tools import ToolSchema
from driftgym.errors import GeneratorError
from driftgym.types import Completion, Message

TOOL = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {}}})
USER = Message(role="user", content="Go.")
Encode = Callable[[str], list[int]]


def result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call_0", name="add")


async def test_each_request_begins_with_the_last_prompt_and_what_was_sampled(
    compact: Renderer, encode_tiny: Encode, generator_type: Any, soon: Callable[[], float]
) -> None:
    # The second answer is written in a way that no renderer writes it: it must come back as it was sampled.
    script = ['<tool_call>{"name":"add"}</tool_call>', '<tool_call>{ "name" : "add" }</tool_call>', "4"]
    generator = generator_type(encode_tiny, compact.stop_token_ids[0], script)
    agent = ToolAgent(generator, compact, AgentConfig(max_tokens_per_turn=32, temperature=0.7))
    conversation = agent.start(session_id="s", tools=[TOOL])
    first = await conversation.act([USER], deadline_s=soon(), min_policy_version=2)
    second = await conversation.act([result("3")], deadline_s=soon())
    third = await conversation.act([result("ć🧪")], deadline_s=soon())
    one, two, three = (request["prompt"] for request in generator.requests)
    assert one == first.new_prompt_token_ids.tolist()
    assert two == [*one, *first.completion.token_ids, *second.new_prompt_token_ids]
    assert three == [*two, *second.completion.token_ids, *third.new_prompt_token_ids]
    assert [request["id"] for request in generator.requests] == ["s-0", "s-1", "s-2"]
    assert generator.requests[0]["min"] == 2
    sampling = generator.requests[0]["sampling"]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 1.0, 32)
    assert sampling.stop_token_ids == compact.stop_token_ids
    assert [call.call_id for turn in (first, second) for call in turn.action.tool_calls] == ["call_0", "call_1"]
    assert third.action.content == "4"


async def test_an_answer_cut_by_its_length_is_ended_without_being_sampled(
    compact: Renderer, encode_tiny: Encode, generator_type: Any, soon: Callable[[], float]
) -> None:
    generator = generator_type(encode_tiny, compact.stop_token_ids[0], ["yes and...", ""])
    conversation = ToolAgent(generator, compact, AgentConfig()).start(session_id="s", tools=[TOOL])
    first = await conversation.act([USER], deadline_s=soon())
    second = await conversation.act([USER], deadline_s=soon())
    assert first.completion.token_ids.tolist() == encode_tiny("yes and")
    assert second.new_prompt_token_ids[0] == compact.stop_token_ids[0]
    assert second.action == Message(role="assistant")


async def test_a_context_that_the_template_rewrites_is_sent_whole_and_said(
    toy_tokenizer: Any, generator_type: Any, soon: Callable[[], float]
) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\n') }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = toy_tokenizer(template)
    renderer = TemplateRenderer(tokenizer)

    generator = generator_type(tokenizer.encode, tokenizer.eos_token_id, ["<think>hm</think>Here.", "Short."])
    conversation = ToolAgent(generator, renderer, AgentConfig()).start(session_id="s", tools=())
    first = await conversation.act([USER], deadline_s=soon())
    second = await conversation.act([Message(role="user", content="again, shorter")], deadline_s=soon())
    assert not first.rewrites_context
    assert second.rewrites_context
    assert generator.requests[1]["prompt"] == second.new_prompt_token_ids.tolist()
    text = tokenizer.decode(generator.requests[1]["prompt"])
    assert text == "[user]Go.<eot>\n[assistant]Here.<eot>\n[user]again, shorter<eot>\n[assistant]"


async def test_the_answer_is_bounded_by_the_room_that_is_left(
    compact: Renderer, encode_tiny: Encode, generator_type: Any, soon: Callable[[], float]
) -> None:
    num_prompt = len(compact.first_prompt([USER], [TOOL]))

    generator = generator_type(encode_tiny, compact.stop_token_ids[0], ["yes"])
    tight = AgentConfig(max_context_tokens=num_prompt + 3)
    await ToolAgent(generator, compact, tight).start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert generator.requests[0]["sampling"].max_tokens == 3
    full = AgentConfig(max_context_tokens=num_prompt)
    with pytest.raises(OutOfTokensError):
        await ToolAgent(generator, compact, full).start(session_id="s", tools=[TOOL]).act([USER], deadline_s=soon())
    assert len(generator.requests) == 1


async def test_an_aborted_answer_is_the_generator_s_fault(
    compact: Renderer, encode_tiny: Encode, generator_type: Any, soon: Callable[[], float]
) -> None:
    aborted = Completion(request_id="r", token_ids=[9], logprobs=[-1.0], policy_versions=[0], finish_reason="abort")

    generator = generator_type(encode_tiny, compact.stop_token_ids[0], [aborted])
    with pytest.raises(GeneratorError, match="aborted"):
        await (
            ToolAgent(generator, compact, AgentConfig())
            .start(session_id="s", tools=[TOOL])
            .act([USER], deadline_s=soon())
        )
