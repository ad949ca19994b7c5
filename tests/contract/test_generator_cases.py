"""Faults that people met in systems like this one, played from end to end: engine, client, pool, agent, tools, record.

Each test names the case and says what must hold. The parts' own tests hold the neighbours of each case.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest
from counted_tools import CountedTools, LineEngine, encode_tiny, play, play_lines, pool_over
from pool_engines import QUICK, Events
from stub_engine import StubEngine, reply, weights

from driftgym.agents.compact_renderer import CompactRenderer
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.scripted import ScriptedGenerator, ScriptedRequest
from driftgym.errors import GeneratorError
from driftgym.trainer.segments import segments_of
from driftgym.types import Message, SamplingParams, ToolCall, Trajectory, TrajectoryStatus


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def sampled(trajectory: Trajectory) -> list[list[int]]:
    return [turn.completion.token_ids.tolist() for turn in trajectory.turns]


def check_record(trajectory: Trajectory, engine: LineEngine, lines: Sequence[str]) -> None:
    """Each prompt is the one before, what was sampled, and what was added; what was sampled is what was sent."""
    assert sampled(trajectory) == [engine.ids_of(line) for line in lines]
    whole: list[int] = []
    for turn, prompt in zip(trajectory.turns, engine.prompts, strict=True):
        whole = [] if turn.rewrites_context else whole
        whole += turn.new_prompt_token_ids.tolist()
        assert prompt == whole
        whole += turn.completion.token_ids.tolist()


async def test_a_draft_in_the_thinking_block_is_no_call() -> None:
    """Case A3: the tool runs once, with what was decided on."""
    draft, decided = (call(f'{{"name":"pay","arguments":{{"eur":{eur}}}}}') for eur in (900, 9))
    lines = [f"<think>maybe {draft}? no, less.</think>{decided}", "<think>I write no <tool_call> now.</think>Paid."]
    env, engine = CountedTools("pay"), LineEngine(list(lines))
    trajectory = await play_lines(engine, env)
    assert env.ran == [("pay", {"eur": 9})]
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert "policy_error" not in trajectory.events
    assert trajectory.turns[1].action.tool_calls == ()
    check_record(trajectory, engine, lines)


@pytest.mark.parametrize("arguments", ['{"q":"Zürich \\"HB\\""}', "", "{}", None])
async def test_arguments_given_as_text_reach_the_engine_as_an_object(arguments: str | None) -> None:
    """Case A4: a history with arguments as JSON text gives the ids of one with arguments as an object."""
    as_object = {"q": 'Zürich "HB"'} if arguments and "q" in arguments else {}
    prompts = []
    for given in (as_object, arguments):
        asked = ToolCall(call_id="call_0", name="find", arguments=as_object)
        object.__setattr__(asked, "arguments", given)
        history = (
            Message(role="user", content="Where?"),
            Message(role="assistant", tool_calls=(asked,)),
            Message(role="tool", content="Gleis 3", tool_call_id="call_0", name="find"),
        )
        engine = LineEngine(["There."])
        await play_lines(engine, CountedTools("find", first=history))
        prompts += engine.prompts
    assert prompts[0] == prompts[1]


async def test_an_undeclared_tool_is_answered_and_the_episode_goes_on() -> None:
    """Case A5: it is an observation and is counted, never a final answer."""
    lines = [call('{"name":"read","arguments":{}}'), call('{"name":"view","arguments":{}}'), "Done."]
    env, engine = CountedTools("view", "edit"), LineEngine(list(lines))
    trajectory = await play_lines(engine, env)
    (answer,) = trajectory.turns[0].observation
    assert (answer.role, answer.tool_call_id) == ("tool", "call_0")
    assert "'read'" in answer.text
    assert env.ran == [("view", {})]
    assert trajectory.events["unknown_tool"] == 1
    assert len(trajectory.turns) == 3
    check_record(trajectory, engine, lines)


async def test_an_undeclared_tool_beside_a_declared_one_is_answered_in_its_place() -> None:
    """Case A5, in one message: both are answered, in their order; the declared one runs."""
    both = call('{"name":"read","arguments":{}}') + call('{"name":"view","arguments":{"path":"a"}}')
    env = CountedTools("view", "edit")
    trajectory = await play_lines(LineEngine([both, "Done."]), env)
    unknown, ran = trajectory.turns[0].observation
    assert (unknown.tool_call_id, ran.tool_call_id, ran.text) == ("call_0", "call_1", "view ran")
    assert unknown.text.startswith("error:")
    assert env.ran == [("view", {"path": "a"})]


async def test_bad_arguments_stop_no_sibling() -> None:
    """Case A6: the good one runs once; the others are answered in their order, under their own ids."""
    bodies = ('{"a":1,"b":2}', '{"a":1,,}', "[1,2]", "null", '"x"', "3")
    line = "".join(call(f'{{"name":"add","arguments":{body}}}') for body in bodies)
    env = CountedTools("add")
    trajectory = await play_lines(LineEngine([line, "3"]), env)
    replies = trajectory.turns[0].observation
    assert [each.tool_call_id for each in replies] == [f"call_{index}" for index in range(6)]
    assert replies[0].text == "3"
    assert all(each.text.startswith("error:") for each in replies[1:])
    assert [arguments for _, arguments in env.ran] == [{"a": 1, "b": 2}]
    assert trajectory.status is TrajectoryStatus.COMPLETED


async def test_code_is_no_call() -> None:
    """Case A7: fenced data and fenced documentation end the episode as an answer, which is left as it is."""
    example = call('{"name":"add","arguments":{"a":1,"b":2}}')
    answer = f'The package:\n```json\n{{"name":"demo-pkg","version":"2.1.0"}}\n```\nThe form:\n```\n{example}\n```\n'
    env = CountedTools("add", "demo-pkg")
    trajectory = await play_lines(LineEngine([answer]), env)
    assert env.ran == []
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert trajectory.turns[0].action.text == answer
    assert "policy_error" not in trajectory.events


async def test_what_was_sampled_is_never_written_anew() -> None:
    """Case A8: the tool gets the exact strings; the next prompt holds the sampled ids."""
    arguments = '{"город":"Łódź","emoji":"🧪","raw":"\\\\u00e9 stays literal"}'
    lines = [call(f'{{"name":"say","arguments":{arguments}}}'), "Said."]
    env, engine = CountedTools("say"), LineEngine(list(lines))
    trajectory = await play_lines(engine, env)
    assert env.ran == [("say", {"город": "Łódź", "emoji": "🧪", "raw": "\\u00e9 stays literal"})]
    check_record(trajectory, engine, lines)


async def test_the_record_is_the_whole_conversation_rendered_once() -> None:
    """Case B1: three turns with tools; separators come, once, and are not trained; neither is a system prompt."""
    system = Message(role="system", content="Be brief.")
    adds = [call(f'{{"name":"add","arguments":{{"a":{number},"b":1}}}}') for number in range(3)]
    env = CountedTools("add", first=(system, Message(role="user", content="Go.")))
    engine = LineEngine([*adds, "Done."])
    trajectory = await play_lines(engine, env)
    check_record(trajectory, engine, [*adds, "Done."])
    messages = list(env.first)
    for turn in trajectory.turns:
        messages += [turn.action, *turn.observation]
    whole = engine.renderer.first_prompt(messages, env.tools)
    record = [*engine.prompts[-1], *sampled(trajectory)[-1]]
    assert record == whole[: len(record)]
    (segment,) = segments_of(trajectory, advantage=1.0)
    assert segment.loss_mask.sum() == sum(map(len, sampled(trajectory)))
    assert [int(each) for each in segment.token_ids] == record


async def test_a_plain_follow_up_reaches_the_engine() -> None:
    """Case B2: the follow-up is in the second prompt, after all of the first and what was sampled, thinking too."""
    lines = ["<think>long</think>A long answer.", "Short."]
    engine = LineEngine(list(lines))
    trajectory = await play_lines(engine, CountedTools("add", follow_ups=["again, shorter"]))
    check_record(trajectory, engine, lines)
    first, second = engine.prompts
    follow_up = engine.encode("again, shorter")
    start = len(first) + len(sampled(trajectory)[0])
    assert any(second[at : at + len(follow_up)] == follow_up for at in range(start, len(second)))


async def test_worked_examples_are_not_trained() -> None:
    """Case B5: of a prompt with an assistant's turn in it, only what the engine sampled has a mask and log-probs."""
    example = ToolCall(call_id="x0", name="add", arguments={"a": 2, "b": 2})
    first = (
        Message(role="user", content="add 2 and 2"),
        Message(role="assistant", tool_calls=(example,)),
        Message(role="tool", content="4", tool_call_id="x0", name="add"),
        Message(role="assistant", content="4"),
        Message(role="user", content="add 1 and 2"),
    )
    lines = [call('{"name":"add","arguments":{"a":1,"b":2}}'), "3"]
    engine = LineEngine(list(lines))
    trajectory = await play_lines(engine, CountedTools("add", first=first))
    (segment,) = segments_of(trajectory, advantage=1.0)
    num_sampled = sum(len(engine.ids_of(line)) for line in lines)
    assert segment.loss_mask.sum() == num_sampled
    assert (segment.behaviour_logprobs[segment.loss_mask] == -0.5).all()
    assert (segment.behaviour_logprobs[~segment.loss_mask] == 0).all()
    assert segment.token_ids[segment.loss_mask].tolist() == [token for line in lines for token in engine.ids_of(line)]


async def test_an_episode_over_an_update_keeps_each_token_s_version() -> None:
    """Case C5: 4 tokens at version 3, cut short by the engine, then 6 at version 5; min 3, max 5."""
    engine = LineEngine()
    parts = [
        reply([8, 8, 8, 8], spans=[("1:3", 0, 4)], reason={"type": "abort", "message": "Aborted"}),
        reply([9, 9, 9, 9, 9, engine.renderer.stop_token_ids[0]], spans=[("1:5", 0, 6)]),
    ]

    class Parts(StubEngine):
        async def respond(self, path: str, body: dict) -> tuple[int, object]:
            if path == "/generate":
                self.answer = parts.pop(0)
            return await super().respond(path, body)

    stub = Parts()
    stub.model = engine.model
    async with pool_over(stub) as pool:
        trajectory = await play(CountedTools("add"), pool, engine.renderer)
    (turn,) = trajectory.turns
    assert turn.completion.policy_versions.tolist() == [3] * 4 + [5] * 6
    assert trajectory.min_policy_version == 3
    first, second = (body["input_ids"] for path, body in stub.calls if path == "/generate")
    assert second == [*first, 8, 8, 8, 8]


@pytest.mark.parametrize("spans", [[("2:3", 0, 1)], [("default", 0, 1)], [("1:3", 0, 0)], []])
async def test_tokens_of_no_known_weights_are_no_data(spans: list) -> None:
    """Case C5, of a life that is lost or of weights without a name: an error of the infrastructure, never a score."""
    engine = LineEngine()
    stub = StubEngine()
    stub.model = engine.model
    stub.answer = reply([5], spans=spans)
    async with stub.client() as client:
        trajectory = await play(CountedTools("add"), client, engine.renderer)
    assert trajectory.status is TrajectoryStatus.INFRA_ERROR
    assert trajectory.reward is None
    assert trajectory.turns == ()


async def test_tokens_of_weights_that_nobody_has_published_yet_are_asked_for_again_elsewhere() -> None:
    """One of two engines names a version that no step has made: its lag would be below 0."""
    renderer = LineEngine().renderer
    lying, honest = (LineEngine(answer_of=lambda prompt: "Done.") for _ in range(2))
    async with lying.client() as first, honest.client() as second:
        pool = GeneratorPool([first, second], policy_version=3, watch=QUICK)
        await pool.update_weights(weights(4), mode="in_flight", timeout_s=10)
        lying.version = "1:9"
        playing = (play(CountedTools("add"), pool, renderer, name=f"g{index}") for index in range(8))
        trajectories = await asyncio.gather(*playing)
        await pool.close()
    assert lying.prompts
    assert {each.status for each in trajectories} == {TrajectoryStatus.COMPLETED}
    versions = [turn.completion.policy_versions for each in trajectories for turn in each.turns]
    assert set(np.concatenate(versions).tolist()) == {4}


class Reviving(ScriptedGenerator):
    """An engine that somebody starts anew."""

    def revive(self) -> None:
        self._is_dead = False


async def test_episodes_outlive_one_engine_and_then_both() -> None:
    """Case H2: one dies in the middle of a turn, then both, then one is back: no episode is lost, or empty."""
    encode, renderer = encode_tiny(), LineEngine().renderer
    add, done = call('{"name":"add","arguments":{"a":1,"b":2}}'), "the sum is 3"
    turn_opens = renderer.first_prompt([], ())[0]
    num_before = renderer.first_prompt([Message(role="user", content="Go.")], ()).count(turn_opens)

    def script(request: ScriptedRequest) -> list[int]:
        """Goes on from what the prompt ends with."""
        ids = list(request.prompt_token_ids)
        lines = [[*encode(line), *renderer.stop_token_ids] for line in (add, done)]
        header = renderer.first_prompt([], ())
        start = max(at for at in range(len(ids)) if ids[at : at + len(header)] == header) + len(header)
        line = lines[0] if ids.count(turn_opens) < num_before + 3 else lines[1]
        written = ids[start:]
        assert line[: len(written)] == written, "tokens that nobody wrote"
        return line[len(written) :]

    events = Events()
    engines = [Reviving(script, token_latency_s=0.01) for _ in range(2)]
    pool = GeneratorPool(engines, policy_version=0, chunk_tokens=8, watch=QUICK, on_event=events)
    envs = [CountedTools("add") for _ in range(12)]
    playing = [asyncio.create_task(play(env, pool, renderer, name=f"g{index}")) for index, env in enumerate(envs)]
    await asyncio.sleep(0.08)
    engines[0].kill()
    await asyncio.sleep(0.08)
    engines[1].kill()
    await asyncio.sleep(0.5)
    assert not any(episode.done() for episode in playing)
    with pytest.raises(GeneratorError, match="no generator answers"):
        await pool.health()
    engines[1].revive()
    for env, trajectory in zip(envs, await asyncio.gather(*playing), strict=True):
        assert trajectory.status is TrajectoryStatus.COMPLETED
        assert env.ran == [("add", {"a": 1, "b": 2})]
        assert sampled(trajectory) == [[*encode(line), *renderer.stop_token_ids] for line in (add, done)]
    assert events.names == ["generator_lost", "generator_lost", "generator_returned"]
    assert pool.names == ("1",)
    await pool.close()


async def test_an_engine_that_answers_nothing_is_no_score() -> None:
    """Case H2: an empty answer is the engine's failure, not a policy's, and is never graded."""
    engine = LineEngine()
    stub = StubEngine()
    stub.model = engine.model
    for reason in ({"type": "stop", "matched": None}, {"type": "abort", "message": "x", "status_code": 500}):
        stub.answer = reply([], reason=reason)
        env = CountedTools("add")
        async with stub.client() as client:
            trajectory = await play(env, client, engine.renderer)
        assert trajectory.status is TrajectoryStatus.INFRA_ERROR
        assert env.statuses == []


async def test_200_episodes_wait_for_the_engine_at_once() -> None:
    """Case H3: nothing between the episodes and the engine holds them up: none is answered before all are there."""
    engine = LineEngine(answer_of=lambda prompt: "Done.")
    engine.wants = 200
    async with engine.client(max_concurrency=200) as client:
        pool = GeneratorPool([client], policy_version=3, max_concurrency=200)
        playing = (play(CountedTools("add"), pool, engine.renderer, name=f"g{index}") for index in range(200))
        trajectories = await asyncio.gather(*playing)
        await pool.close()
    assert {each.status for each in trajectories} == {TrajectoryStatus.COMPLETED}
    assert engine.peak_in_flight == 200


async def test_a_slow_answer_is_taken_and_a_late_one_is_a_typed_error() -> None:
    """Case H4: the configured deadline decides, in the whole stack."""
    engine = LineEngine(answer_of=lambda prompt: "Done.")
    engine.delay_s = 1.0
    async with pool_over(engine) as pool:
        trajectory = await play(CountedTools("add"), pool, engine.renderer)
        assert trajectory.status is TrajectoryStatus.COMPLETED
        began = time.monotonic()
        with pytest.raises(GeneratorError, match="deadline"):
            await pool.generate(
                [1], SamplingParams(), request_id="late", session_id="s", deadline_s=time.monotonic() + 0.2
            )
        assert time.monotonic() - began < 10


async def test_sessions_stay_where_their_prefix_is() -> None:
    """Case H5: four engines, eight long episodes at once: two on each, and all turns of one on the same."""
    add = call('{"name":"add","arguments":{"a":1,"b":2}}')
    encode, renderer = encode_tiny(), LineEngine().renderer
    assert isinstance(renderer, CompactRenderer)
    answer = [*encode(add), *renderer.stop_token_ids]
    engines = [ScriptedGenerator(lambda request: answer, token_latency_s=0.001) for _ in range(4)]
    pool = GeneratorPool(engines, policy_version=0)
    playing = (play(CountedTools("add"), pool, renderer, name=f"g{index}", max_turns=4) for index in range(8))
    await asyncio.gather(*playing)
    homes = [{request.session_id for request in engine.requests} for engine in engines]
    assert [len(home) for home in homes] == [2] * 4
    assert len(set().union(*homes)) == 8
    assert np.array([len(engine.requests) for engine in engines]).tolist() == [8] * 4
    await pool.close()
