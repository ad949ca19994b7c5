"""What every `ToolEnv` keeps, whatever it is made of."""

import asyncio
import math
import warnings
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from driftgym.config import Limits
from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.envs.registry import make_env
from driftgym.envs.slots import EnvSlots
from driftgym.sandboxes.base import SandboxConfig
from driftgym.sandboxes.providers import open_provider
from driftgym.types import Message, ToolCall, TrajectoryStatus

_FOREIGN = '''
import gymnasium
from gymnasium.spaces import Discrete, Text


class Guess(gymnasium.Env):
    """Guess a digit within three tries."""

    observation_space = Text(max_length=100, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._tries, self._answer = 0, int(self.np_random.integers(10))
        return "guess a digit", {}

    def step(self, action):
        self._tries += 1
        hit = action == self._answer
        return "right" if hit else "wrong", float(hit), hit, not hit and self._tries == 3, {}


gymnasium.register("contract/Guess-v0", entry_point=Guess)
'''
_LIMITS = Limits(tool_call_s=5.0, close_s=5.0)
_SCORED = [status for status in TrajectoryStatus if status.is_scored]


@pytest.fixture(params=["lookup-process", "lookup-scripted", "lookup-two-calls", "foreign"])
async def make(request, tmp_path: Path, monkeypatch):
    """Makes environments of one kind; they and their boxes are closed at the end."""
    made = []
    provider = None
    if request.param == "foreign":
        (tmp_path / "contract_envs.py").write_text(_FOREIGN)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        env_id, kwargs = "driftgym/Process-v0", {"env_id": "contract_envs:contract/Guess-v0"}
    else:
        if request.param == "lookup-scripted":
            provider = ScriptedLookupProvider()
        else:
            provider = await open_provider(SandboxConfig(kind="process"), say=print)
        env_id = "driftgym/Lookup-v0"
        kwargs = {"level": "two_calls"} if request.param == "lookup-two-calls" else {}

    def make_one():
        made.append(make_env(env_id, sandboxes=provider, limits=_LIMITS, kwargs=kwargs))
        return made[-1]

    yield make_one
    for env in made:
        await env.aclose()
    if provider is not None:
        await provider.close()


def _say(text):
    return Message(role="assistant", content=text)


async def _episode(env, seed):
    """All that is seen of an episode in which the agent says 0 until it ends."""
    seen = [(await env.areset(seed=seed)).messages, env.tools]
    for _ in range(5):
        result = await env.astep(_say("0"))
        seen.append((result.messages, result.terminated, result.reward))
        if result.terminated:
            break
    return [*seen, await env.grade(TrajectoryStatus.COMPLETED)]


async def test_first_prompt_is_text_for_the_model(make):
    begun = await make().areset(seed=1)
    assert begun.messages
    assert {message.role for message in begun.messages} <= {"system", "user"}
    assert begun.messages[-1].text


async def test_same_seed_same_world_in_any_instance(make):
    first, second = make(), make()
    begun = await first.areset(seed=7)
    assert (await second.areset(seed=7)).messages == begun.messages
    assert (await first.areset(seed=7)).messages == begun.messages


async def test_an_episode_does_not_depend_on_those_before_it(make):
    used, fresh = make(), make()
    for seed in (1, 2, 3):
        await _episode(used, seed)
    await used.areset(seed=4)  # left in the middle
    assert await _episode(used, 5) == await _episode(fresh, 5)


async def test_an_unknown_tool_is_answered_under_its_id_and_the_episode_goes_on(make):
    env = make()
    await env.areset(seed=1)
    calls = tuple(ToolCall(call_id=f"c{i}", name="no_such_tool", arguments={}) for i in range(2))
    result = await env.astep(Message(role="assistant", tool_calls=calls))
    assert [message.tool_call_id for message in result.messages] == ["c0", "c1"]
    assert all("no_such_tool" in message.text for message in result.messages)
    assert result.events["unknown_tool"] == 2
    assert not result.terminated
    await env.astep(_say("0"))


async def test_an_unreadable_call_is_answered_with_the_reason(make):
    env = make()
    await env.areset(seed=1)
    call = ToolCall(call_id="c", name="x", arguments=None, parse_error="arguments are not JSON: line 1")
    result = await env.astep(Message(role="assistant", tool_calls=(call,)))
    assert result.messages[0].role == "tool"
    assert "not JSON" in result.messages[0].text
    assert result.events["policy_error"] == 1
    assert not result.terminated


@pytest.mark.parametrize("text", ["", "\x00", "ü" * 10_000, '{"tool_calls": [1]}', "9" * 5000])
async def test_nonsense_from_the_agent_raises_nothing(make, text):
    env = make()
    await env.areset(seed=1)
    await env.astep(_say(text))
    grade = await env.grade(TrajectoryStatus.TRUNCATED_TURNS)
    assert grade.reward == 0


@pytest.mark.parametrize("status", _SCORED)
async def test_graded_however_it_ended(make, status):
    env = make()
    await env.areset(seed=1)
    grade = await env.grade(status)
    assert math.isfinite(grade.reward)
    assert await env.grade(status) == grade


async def test_closed_twice_and_before_the_first_episode(make):
    unused, used = make(), make()
    await unused.aclose()
    await used.areset(seed=1)
    await used.aclose()
    await used.aclose()


async def test_cancelled_anywhere_it_plays_again(make):
    env, fresh = make(), make()
    for delay_s in (0.0, 0.01, 0.05):
        task = asyncio.create_task(_episode(env, 1))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await _episode(env, 2) == await _episode(fresh, 2)


async def test_many_at_once_in_slots(make):
    slots = EnvSlots(make, num_slots=3)
    expected = {seed: await _episode(make(), seed) for seed in range(3)}

    async def play(seed):
        async with slots.lease() as env:
            return await _episode(env, seed)

    episodes = await asyncio.gather(*(play(index % 3) for index in range(12)))
    assert all(episode == expected[index % 3] for index, episode in enumerate(episodes))
    await slots.close()


async def test_gymnasiums_checker_finds_nothing(make):
    env = make()

    def check():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with env.spec.make().unwrapped as own:
                check_env(own)

    await asyncio.to_thread(check)
