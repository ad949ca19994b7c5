import os
import time

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from driftgym.config import Limits
from driftgym.envs.registry import make_env
from driftgym.envs.slots import EnvSlots
from driftgym.errors import ConfigError, EnvError
from driftgym.types import Message, ToolCall, TrajectoryStatus


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


@pytest.fixture
async def guess(foreign_module):
    """Makes foreign environments and closes them."""
    made = []

    def make(env_id="foreign/Guess-v0", limits=None, **settings):
        kwargs = {"env_id": f"{foreign_module}:{env_id}", **settings}
        made.append(make_env("driftgym/Process-v0", limits=limits, kwargs=kwargs))
        return made[-1]

    yield make
    for env in made:
        await env.aclose()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_an_episode(guess):
    env = guess(env_kwargs={"answer": 4}, instructions="Play.")
    first = await env.areset(seed=1, options={"a": 1})
    assert [(message.role, message.text) for message in first.messages] == [
        ("system", "Play."),
        ("user", "guess a digit"),
    ]
    assert first.info == {"num_resets": 1, "options": {"a": 1}}
    assert (await env.astep(_say("3"))).messages[0].text == "too low"
    last = await env.astep(_say(" 4 "))
    assert (last.messages[0].text, last.terminated, last.reward, last.info) == ("right", True, 1.0, {"tries": 2})
    assert (await env.grade(TrajectoryStatus.COMPLETED)).reward == 1.0


async def test_truncation_keeps_the_last_observation(guess):
    env = guess(env_kwargs={"answer": 4})
    await env.areset(seed=1)
    results = [await env.astep(_say("5")) for _ in range(3)]
    assert [result.terminated for result in results] == [False, False, True]
    assert results[-1].messages[0].text == "too high"
    assert results[-1].info == {"tries": 3, "truncated": True}
    assert (await env.grade(TrajectoryStatus.COMPLETED)).reward == 0.0


@pytest.mark.parametrize("text", ["", "four", "10", "-1", "4.0", "9" * 5000, "\u0664\u0662"])
async def test_what_is_no_action_is_told_and_not_played(guess, text):
    env = guess(env_kwargs={"answer": 4})
    await env.areset(seed=1)
    refused = await env.astep(_say(text))
    assert refused.messages[0].text.startswith("error: ")
    assert refused.events == {"policy_error": 1}
    assert not refused.terminated
    assert (await env.astep(_say("4"))).info == {"tries": 1}


async def test_tool_calls_are_unknown(guess):
    env = guess()
    await env.areset(seed=1)
    call = ToolCall(call_id="c", name="guess", arguments={})
    result = await env.astep(Message(role="assistant", tool_calls=(call,)))
    assert result.events == {"policy_error": 1, "unknown_tool": 1}
    assert result.messages[0].tool_call_id == "c"


async def test_one_reset_per_episode_and_slots_do_not_touch(guess):
    """Five episodes in each of two slots, some left early: as many resets as episodes, and tasks do not depend on
    how earlier ones ended."""
    slots = EnvSlots(guess, num_slots=2)
    counts = []
    async with slots.lease() as first, slots.lease() as second:
        for episode in range(5):
            for env, tries in ((first, 1 + episode % 3), (second, 3)):
                begun = await env.areset(seed=episode)
                results = [await env.astep(_say("0")) for _ in range(tries)]
                counts.append((begun.info["num_resets"], episode + 1))
                assert results[0].messages == (await _fresh_reply(guess, episode))
    assert all(seen == expected for seen, expected in counts)
    await slots.close()


_replies: dict[int, tuple[Message, ...]] = {}


async def _fresh_reply(guess, seed):
    if seed not in _replies:
        env = guess()
        await env.areset(seed=seed)
        _replies[seed] = (await env.astep(_say("0"))).messages
        await env.aclose()
    return _replies[seed]


async def test_a_hang_is_an_error_within_the_deadline_and_the_child_is_dead(guess):
    env = guess(env_kwargs={"misbehave": "hang"}, limits=Limits(tool_call_s=0.3))
    await env.areset(seed=1)
    pid = env._child.pid
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"step did not end within 0\.3 s"):
        await env.astep(_say("1"))
    assert time.monotonic() - started < 10
    assert _is_gone(pid)
    assert (await env.areset(seed=1)).messages[0].text == "guess a digit"


@pytest.mark.parametrize(("misbehave", "said"), [("raise", "RuntimeError: it broke"), ("crash", "exit code 7")])
async def test_failures_are_env_errors_and_the_next_episode_plays(guess, misbehave, said):
    env = guess(env_kwargs={"misbehave": misbehave})
    await env.areset(seed=1)
    with pytest.raises(EnvError, match=said):
        await env.astep(_say("1"))
    with pytest.raises(EnvError, match="before areset"):
        await env.astep(_say("1"))
    assert (await env.areset(seed=1)).info["num_resets"] == 1


async def test_killed_from_outside(guess):
    env = guess()
    await env.areset(seed=1)
    os.kill(env._child.pid, 9)
    with pytest.raises(EnvError, match="exit code -9"):
        await env.astep(_say("1"))


async def test_unknown_environment_is_named(guess):
    with pytest.raises(ConfigError, match=r"foreign/Gues-v0.*did you mean 'foreign/Guess-v0'"):
        await guess("foreign/Gues-v0").areset(seed=1)


async def test_an_environment_of_this_process_alone_is_not_found(registered, echo_env_type):
    env_id = registered("test/Local-v0", entry_point=echo_env_type)
    env = make_env("driftgym/Process-v0", kwargs={"env_id": env_id})
    with pytest.raises(ConfigError, match=r"test/Local-v0.*not registered in this process"):
        await env.areset(seed=1)
    await env.aclose()


async def test_other_spaces_need_a_formatter(guess, foreign_module):
    with pytest.raises(ConfigError, match="formatter"):
        await guess("foreign/Arm-v0").areset(seed=1)
    env = guess(env_kwargs={"answer": 3}, formatter=f"{foreign_module}:Yes")
    assert (await env.areset(seed=1)).messages[0].text == "<guess a digit>"
    assert (await env.astep(_say("no"))).messages[0].text == "error: say yes"
    assert (await env.astep(_say("yes"))).messages[0].text == "<right>"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await guess(formatter=f"{foreign_module}:No").areset(seed=1)


def test_arguments_that_cannot_be_sent_are_refused_at_once():
    with pytest.raises(ConfigError, match="cannot be sent to a process"):
        make_env("driftgym/Process-v0", kwargs={"env_id": "e", "env_kwargs": {"f": lambda: 1}})
    with pytest.raises(ConfigError, match="env_id"):
        make_env("driftgym/Process-v0")


def test_gymnasiums_checker_finds_nothing(foreign_module):
    env = gymnasium.make("driftgym/Process-v0", env_id=f"{foreign_module}:foreign/Guess-v0").unwrapped
    check_env(env)
    env.close()


def test_numbers_of_numpy_get_through(foreign_module):
    env = make_env("driftgym/Process-v0", kwargs={"env_id": "CartPole-v1"})
    observation, _ = env.reset(seed=1)
    assert observation.startswith("[")
    _, reward, terminated, _, _ = env.step("1")
    assert (reward, terminated) == (1.0, False)
    env.close()
