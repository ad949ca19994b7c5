"""Each tokenizer that is used here: a conversation grows by what is new, and is never written anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driftgym.agents.context import TokenContext
from driftgym.agents.library_renderer import LibraryRenderer
from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.agents.template_renderer import TemplateRenderer
from driftgym.envs.tools import ToolSchema
from driftgym.types import Message, ToolCall

TOOL = ToolSchema(
    name="find",
    description="Finds.",
    parameters={"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
)
SYSTEM = Message(role="system", content="Be brief.")
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_DATE = "[{{ strftime_now('FORMAT') }}]" + WITH_BOS


def calling(number: int) -> Message:
    call = ToolCall(call_id=f"call_{number}", name="find", arguments={"q": f'Zürich "HB" {number}'})
    return Message(role="assistant", content="", reasoning="I look.", tool_calls=(call,))


def result(number: int, text: str = "Gleis 3") -> Message:
    return Message(role="tool", content=text, tool_call_id=f"call_{number}", name="find")


SMOLLM2 = pytest.param("smollm2", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")])
KINDS = ["tiny-qwen3", "template", "qwen3", "llama-3", SMOLLM2]


@pytest.fixture
def renderer(
    request: pytest.FixtureRequest, tiny_folder: Path, toy_tokenizer: Callable[..., Any], qwen3_tokenizer: Any
) -> Renderer:
    kind = request.param
    if kind == "tiny-qwen3":
        return make_renderer("auto", tiny_folder)
    if kind == "smollm2":
        return TemplateRenderer(request.getfixturevalue("smollm2_tokenizer"))
    if kind == "qwen3":
        return LibraryRenderer(qwen3_tokenizer, "qwen3")
    if kind == "llama-3":
        special = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
        more = ("<|python_tag|>", "<|eom_id|>", "<|finetune_right_pad_id|>")
        return LibraryRenderer(toy_tokenizer(None, special=(*special, *more)), "llama-3")
    return TemplateRenderer(toy_tokenizer(WITH_BOS))


@pytest.mark.parametrize("renderer", KINDS, indirect=True)
def test_three_turns_are_the_whole_rendered_once(renderer: Renderer) -> None:
    """Where each turn is sampled as the template writes it; so no separator is missing, and nothing comes twice."""
    conversation = [SYSTEM, Message(role="user", content="Where?")]
    prompt = renderer.first_prompt(conversation, [TOOL])
    for number in range(3):
        sampled = renderer.encode_action(conversation, calling(number), [TOOL])
        conversation.append(calling(number))
        new = [result(number, f"Gleis {number}, Łódź 🧪")]
        bridge = renderer.next_prompt(
            prompt_token_ids=prompt,
            completion_token_ids=sampled,
            conversation=conversation,
            new_messages=new,
            tools=[TOOL],
        )
        assert bridge is not None
        prompt = [*prompt, *sampled, *bridge]
        conversation += new
        assert prompt == renderer.first_prompt(conversation, [TOOL])


@pytest.mark.parametrize("renderer", KINDS, indirect=True)
def test_whatever_is_sampled_stays_in_the_next_prompt(renderer: Renderer) -> None:
    """Also what no template writes: cut answers, bad calls, strange spaces, a turn's end where none was sampled."""
    end = renderer.stop_token_ids[0]
    whole = renderer.encode_action([SYSTEM, Message(role="user", content="x")], calling(0), [TOOL])
    strange = [[], [end], whole[:3], [*whole[:-1], whole[0], end], [*whole[:2], *whole[:2], end], whole[::-1]]
    context = TokenContext(renderer, [TOOL])
    new = [SYSTEM, Message(role="user", content="Where?")]
    before: list[int] = []
    for number, sampled in enumerate(strange):
        prompt = context.prompt(new)
        if number and not prompt.rewrites_context:
            assert prompt.token_ids[: len(before)] == before
            assert prompt.token_ids[len(before) :] == prompt.new_token_ids
        action = renderer.parse(sampled, prompt_token_ids=prompt.token_ids, first_call_index=number)
        context.add_turn(prompt, new, list(sampled), action)
        before = [*prompt.token_ids, *sampled]
        new = [result(number)] if action.tool_calls else [Message(role="user", content="Go on.")]


def test_the_first_token_comes_once(toy_tokenizer: Callable[..., Any]) -> None:
    """The template writes it; the tokenizer would add another of its own to whatever it encodes."""
    from tokenizers import processors

    tokenizer = toy_tokenizer(WITH_BOS, special=("<eot>", "<bos>"))
    tokenizer.bos_token = "<bos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    renderer = TemplateRenderer(tokenizer)
    context = TokenContext(renderer, ())
    new = [Message(role="user", content="Where?")]
    for _ in range(3):
        prompt = context.prompt(new)
        assert not prompt.rewrites_context
        assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
        assert prompt.token_ids[0] == tokenizer.bos_token_id
        sampled = renderer.encode_action([*context.messages, *new], Message(role="assistant", content="Here."), ())
        context.add_turn(prompt, new, sampled, Message(role="assistant", content="Here."))
        new = [Message(role="user", content="again")]


def test_letters_that_would_melt_together_over_a_boundary_stay_apart(toy_tokenizer: Callable[..., Any]) -> None:
    """What was sampled piece by piece would be encoded as fewer tokens when the whole text is."""
    tokenizer = toy_tokenizer(WITH_BOS.replace("{{ bos_token }}", ""))
    renderer = TemplateRenderer(tokenizer)
    prompt = renderer.first_prompt([Message(role="user", content="x")], ())
    sampled = [token for letter in "assistant" for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(tokenizer.encode("assistant", add_special_tokens=False)) < len(sampled)
    for ids in (sampled, [*sampled, tokenizer.eos_token_id]):
        action = renderer.parse(ids, prompt_token_ids=prompt, first_call_index=0)
        assert action.text == "assistant"
        bridge = renderer.next_prompt(
            prompt_token_ids=prompt,
            completion_token_ids=ids,
            conversation=[Message(role="user", content="x"), action],
            new_messages=[Message(role="user", content="y")],
            tools=(),
        )
        assert bridge is not None
        text = tokenizer.decode([*prompt, *ids, *bridge])
        assert text == "[user]x<eot>\n[assistant]assistant<eot>\n[user]y<eot>\n[assistant]"


@pytest.mark.parametrize(("form", "is_stable"), [("%d %b %Y", True), ("%f", False)])
def test_a_template_that_tells_the_time(toy_tokenizer: Callable[..., Any], form: str, *, is_stable: bool) -> None:
    """A day does not change within an episode; a time that does is a context written anew, and is said to be."""
    renderer = TemplateRenderer(toy_tokenizer(WITH_DATE.replace("FORMAT", form).replace("{{ bos_token }}", "")))
    assert renderer.is_stable is is_stable
    context = TokenContext(renderer, ())
    new = [Message(role="user", content="x")]
    prompt = context.prompt(new)
    context.add_turn(prompt, new, [*prompt.token_ids[:2]], Message(role="assistant", content="y"))
    assert context.prompt([Message(role="user", content="z")]).rewrites_context is not is_stable
