import asyncio
import json

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from driftgym.config import Limits
from driftgym.envs.check import check_tool_env
from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.envs.registry import make_env
from driftgym.errors import ConfigError, EnvError, SandboxError
from driftgym.sandboxes.base import PoolConfig, SandboxConfig
from driftgym.sandboxes.providers import open_provider
from driftgym.types import Message, ToolCall, TrajectoryStatus


class _Counting:
    """A provider that keeps what it started."""

    def __init__(self, inner):
        self._inner = inner
        self.kind = inner.kind
        self.boxes = []

    async def start(self, spec, *, timeout_s):
        box = await self._inner.start(spec, timeout_s=timeout_s)
        self.boxes.append(box)
        return box

    async def list(self):
        return await self._inner.list()

    async def remove(self, sandbox_id):
        await self._inner.remove(sandbox_id)

    async def close(self):
        await self._inner.close()


@pytest.fixture(params=["process", "scripted"])
async def provider(request):
    if request.param == "scripted":
        opened = _Counting(ScriptedLookupProvider())
    else:
        opened = _Counting(await open_provider(SandboxConfig(kind="process"), say=print))
    yield opened
    await opened.close()


@pytest.fixture
async def lookup(provider):
    made = []

    def make(limits=None, **kwargs):
        made.append(make_env("driftgym/Lookup-v0", sandboxes=provider, limits=limits, kwargs=kwargs))
        return made[-1]

    yield make
    for env in made:
        await env.aclose()


def _call(tool, call_id="c0", **arguments):
    return Message(role="assistant", tool_calls=(ToolCall(call_id=call_id, name=tool, arguments=arguments),))


def _say(text):
    return Message(role="assistant", content=text)


def _needed(env):
    return env._world.needed


async def _play(env, *, seed, skill=1.0, max_turns=12, oracle_seed=0):
    begun = await env.areset(seed=seed)
    rng = np.random.default_rng(oracle_seed)
    seen = [begun.messages]
    for _ in range(max_turns):
        result = await env.astep(env.oracle(skill=skill, rng=rng))
        seen.append((result.messages, dict(result.events)))
        if result.terminated:
            break
    return seen, await env.grade(TrajectoryStatus.COMPLETED)


async def test_one_call_takes_two_turns(lookup, provider):
    env = lookup()
    for seed in range(20):
        seen, grade = await _play(env, seed=seed)
        assert len(seen) == 3
        assert grade.reward == 1.0
        assert grade.parts == {"answer": 1.0, "tools": 1.0}
    assert len(provider.boxes) == 1


async def test_two_calls_take_three_turns(lookup):
    env = lookup(level="two_calls")
    for seed in range(20):
        seen, grade = await _play(env, seed=seed)
        assert len(seen) == 4
        assert grade.reward == 1.0


@pytest.mark.parametrize("level", ["one_call", "two_calls"])
async def test_a_player_without_skill_shows_the_form_and_never_scores(lookup, level):
    env = lookup(level=level)
    played = [await _play(env, seed=seed, skill=0.0, oracle_seed=seed, max_turns=30) for seed in range(60)]
    rewards = [grade.reward for _, grade in played]
    assert sum(rewards) == 0
    assert {grade.parts["tools"] for _, grade in played} == {0.0}
    assert all(seen[-1] == ((), {}) for seen, _ in played)
    assert not any("policy_error" in events for seen, _ in played for _, events in seen[1:])


async def test_options_choose_the_level(lookup):
    env = lookup()
    await env.areset(seed=1, options={"level": "two_calls"})
    assert env.tools[0].name == "get_oldest"
    await env.areset(seed=1)
    assert env.tools[0].name == "get_age"
    for options in ({"level": "x"}, {"levl": "one_call"}):
        with pytest.raises(EnvError, match="level"):
            await env.areset(seed=1, options=options)


async def test_right_answer_without_the_tool_is_worth_nothing(lookup):
    env = lookup()
    await env.areset(seed=1)
    await env.astep(_say(_needed(env)[0].result))
    grade = await env.grade(TrajectoryStatus.COMPLETED)
    assert grade.reward == 0
    assert grade.parts == {"answer": 1.0, "tools": 0.0}


async def test_wrong_tool_or_person_is_worth_nothing(lookup):
    env = lookup()
    await env.areset(seed=1)
    (needed,) = _needed(env)
    (person,) = needed.arguments.values()
    wrong_tool = next(schema.name for schema in env.tools if schema.name != needed.tool)
    other = next(name for name in env._world.records if name != person)
    for action in (_call(wrong_tool, person=person), _call(needed.tool, person=other)):
        await env.areset(seed=1)
        said = (await env.astep(action)).messages[0].text
        assert said.isdecimal()
        assert said != needed.result
        await env.astep(_say(said))
        assert (await env.grade(TrajectoryStatus.COMPLETED)).reward == 0


async def test_a_lucky_guess_of_the_oldest_is_worth_nothing(lookup):
    env = lookup(level="two_calls")
    await env.areset(seed=1)
    fetch = _needed(env)[1]
    said = (await env.astep(_call(fetch.tool, **fetch.arguments))).messages[0].text
    await env.astep(_say(said))
    assert (await env.grade(TrajectoryStatus.COMPLETED)).parts == {"answer": 1.0, "tools": 0.0}


async def test_an_episode_without_an_answer_is_graded_zero(lookup):
    env = lookup()
    for status in (TrajectoryStatus.TRUNCATED_TURNS, TrajectoryStatus.TRUNCATED_TIME):
        await env.areset(seed=1)
        (needed,) = _needed(env)
        await env.astep(_call(needed.tool, **needed.arguments))
        assert (await env.grade(status)).reward == 0


async def test_mistakes_are_observations(lookup):
    env = lookup()
    await env.areset(seed=1)
    calls = (
        ToolCall(call_id="a", name="get_salary", arguments={"person": "Ada"}),
        ToolCall(call_id="b", name="get_age", arguments={"person": "Zed \"; \n\u2028'"}),
        ToolCall(call_id="c", name="get_age", arguments={"persn": "Ada"}),
        ToolCall(call_id="d", name="get_age", arguments=None, parse_error="arguments are not JSON"),
    )
    result = await env.astep(Message(role="assistant", tool_calls=calls))
    assert [message.tool_call_id for message in result.messages] == ["a", "b", "c", "d"]
    assert "no such person: Zed" in result.messages[1].text
    assert result.events == {"policy_error": 4, "unknown_tool": 1}
    assert not result.terminated
    (needed,) = _needed(env)
    assert (await env.astep(_call(needed.tool, **needed.arguments))).messages[0].text == needed.result


async def test_state_does_not_leak_and_box_and_process_are_reused(lookup, provider):
    env, fresh = lookup(), lookup()
    await env.areset(seed=1)
    process = env._box._process
    old = dict(env._world.records)
    await env.areset(seed=2)
    assert env._box._process is process
    gone = next(name for name in old if name not in env._world.records)
    answer = (await env.astep(_call("get_age", person=gone))).messages[0].text
    assert answer == f"error: no such person: {gone}"
    assert (await _play(env, seed=2)) == (await _play(fresh, seed=2))
    assert len(provider.boxes) == 2


@pytest.mark.parametrize("reuse", ["fresh", "reset"])
async def test_a_pool_of_fresh_boxes_gives_each_episode_its_own(reuse):
    pool = PoolConfig(reuse=reuse, num_warm=1)
    async with await open_provider(SandboxConfig(kind="process", pool=pool), say=print) as provider:
        env = make_env("driftgym/Lookup-v0", sandboxes=provider)
        seen = set()
        for seed in range(3):
            assert (await _play(env, seed=seed))[1].reward == 1.0
            seen.add(env._box._box.sandbox_id)
        assert len(seen) == (3 if reuse == "fresh" else 1)
        await provider.remove(env._box._box.sandbox_id)
        assert (await _play(env, seed=4))[1].reward == 1.0
        await env.aclose()


async def test_a_hang_is_a_message_and_the_episode_goes_on(lookup, provider):
    env = lookup(faults={"hang": 1.0}, limits=Limits(tool_call_s=0.3))
    await env.areset(seed=1)
    for _ in range(2):
        result = await env.astep(_call("get_age", person=env._world.people[0]))
        assert result.messages[0].text == "error: timed out after 0.3 s"
        assert result.events == {"tool_timeout": 1}
    await env.astep(_say("1"))
    assert (await env.grade(TrajectoryStatus.COMPLETED)).reward == 0
    assert len(provider.boxes) == 1


async def test_a_tool_that_raises_is_an_env_error_with_the_boxs_traceback(lookup):
    env = lookup(faults={"raise": 1.0})
    await env.areset(seed=1)
    with pytest.raises(EnvError, match=r"_tools\.py(.|\n)*RuntimeError: this tool is broken"):
        await env.astep(_call("get_age", person=env._world.people[0]))
    assert (await env.areset(seed=2)).messages


async def test_a_flood_is_cut_and_flagged(lookup):
    env = lookup(faults={"flood": 1.0}, max_output_bytes=100)
    await env.areset(seed=1)
    result = await env.astep(_call("get_age", person=env._world.people[0]))
    text = result.messages[0].text
    assert text == "x" * 100 + "\n[output cut: 99999900 bytes more]"
    assert result.events == {"tool_output_truncated": 1}
    assert (await env.areset(seed=2)).messages


async def test_faults_hit_some_episodes_and_leave_the_others_alone(lookup):
    env = lookup(faults={"hang": 0.1, "raise": 0.1, "flood": 0.1}, limits=Limits(tool_call_s=0.3))
    plain = lookup()
    outcomes = []
    for seed in range(30):
        try:
            seen, grade = await _play(env, seed=seed, max_turns=2)
        except EnvError:
            outcomes.append("raise")
            continue
        events = {event for _, events in seen[1:] for event in events}
        outcomes.append(next(iter(events), "none"))
        if not events:
            assert (seen, grade) == await _play(plain, seed=seed)
    assert {"none", "raise", "tool_timeout", "tool_output_truncated"} == set(outcomes)
    assert outcomes.count("none") > 15


async def test_a_killed_process_is_replaced_in_the_same_box(lookup, provider):
    env = lookup()
    await _play(env, seed=1)
    await env._box._process.kill()
    assert (await _play(env, seed=2))[1].reward == 1.0
    assert len(provider.boxes) == 1


async def test_a_lost_box_is_a_sandbox_error_and_the_next_episode_gets_another(lookup, provider):
    env = lookup()
    await env.areset(seed=1)
    await provider.boxes[0].close()
    (needed,) = _needed(env)
    with pytest.raises(SandboxError):
        await env.astep(_call(needed.tool, **needed.arguments))
    with pytest.raises(SandboxError):
        await env.astep(_call(needed.tool, **needed.arguments))
    assert (await _play(env, seed=2))[1].reward == 1.0
    assert len(provider.boxes) == 2


async def test_a_cancelled_call_does_not_answer_the_next_one(lookup):
    env = lookup(latency_mean_s=0.4)
    await env.areset(seed=1)
    (needed,) = _needed(env)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep(_call(needed.tool, **needed.arguments)), 0.1)
    assert (await _play(env, seed=2))[1].reward == 1.0


async def test_latency_is_spent_in_the_tool(lookup):
    env = lookup(latency_mean_s=0.2)
    await env.areset(seed=1)
    loop = asyncio.get_running_loop()
    started = loop.time()
    (needed,) = _needed(env)
    await env.astep(_call(needed.tool, **needed.arguments))
    assert loop.time() - started > 0.19


async def test_before_areset_everything_says_so(lookup):
    env = lookup()
    for attempt in (env.astep(_say("1")), env.grade(TrajectoryStatus.COMPLETED)):
        with pytest.raises(EnvError, match="before areset"):
            await attempt
    with pytest.raises(EnvError, match="before areset"):
        env.oracle(skill=1.0, rng=np.random.default_rng(0))


async def test_closed_and_opened_again(lookup, provider):
    env = lookup()
    await _play(env, seed=1)
    await env.aclose()
    await env.aclose()
    assert (await _play(env, seed=1))[1].reward == 1.0
    assert len(provider.boxes) == 2


@pytest.mark.parametrize("level", ["one_call", "two_calls"])
def test_gymnasiums_checker_finds_nothing(level):
    env = gymnasium.make("driftgym/Lookup-v0", level=level).unwrapped
    check_env(env)
    env.close()


def test_played_through_gymnasium_with_boxes_of_its_own():
    env = gymnasium.make("driftgym/Lookup-v0", render_mode="ansi")
    env.reset(seed=1)
    (needed,) = env.unwrapped._world.needed
    call = {"id": "c0", "function": {"name": needed.tool, "arguments": json.dumps(needed.arguments)}}
    value, reward, *_ = env.step(json.dumps({"role": "assistant", "tool_calls": [call]}))
    assert (value, reward) == (needed.result, 0.0)
    _, reward, terminated, truncated, info = env.step(value)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["reward_parts"] == {"answer": 1.0, "tools": 1.0}
    assert needed.result in env.render()
    env.close()


@pytest.mark.parametrize("level", ["one_call", "two_calls"])
def test_driftgyms_checker_finds_nothing(level):
    assert check_tool_env("driftgym/Lookup-v0", kwargs={"level": level}) == []


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'latency_mean_s'"):
        make_env("driftgym/Lookup-v0", kwargs={"latency_mean": 1})
