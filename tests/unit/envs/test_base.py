import asyncio
import json

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from driftgym.config import Limits
from driftgym.errors import EnvError


def test_gymnasiums_checker_finds_nothing(registered, echo_env_type):
    env_id = registered("test/Echo-v0", entry_point=echo_env_type)
    env = gymnasium.make(env_id).unwrapped
    check_env(env)
    env.close()


def test_sync_episode_ends_with_the_grade(echo_env_type):
    env = echo_env_type(render_mode="ansi")
    observation, info = env.reset(seed=3)
    word = observation.removeprefix("Say ")
    call = {"id": "c", "function": {"name": "echo", "arguments": {"text": word}}}
    action = json.dumps({"role": "assistant", "tool_calls": [call]})
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation, reward, terminated, truncated) == (word, 0.0, False, False)
    assert info == {"events": {}}
    observation, reward, terminated, truncated, info = env.step(word)
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info == {"events": {}, "reward_parts": {"word": 1.0}}
    assert word in env.render()
    env.close()
    env.close()


def test_info_is_the_callers_own(echo_env_type):
    env = echo_env_type()
    _, first = env.reset(seed=1)
    _, second = env.reset(seed=1)
    assert first == second
    assert first["deep"] is not second["deep"]


def test_step_before_reset_is_refused(echo_env_type):
    with pytest.raises(gymnasium.error.ResetNeeded):
        echo_env_type().step("x")


def test_a_reset_that_hangs_ends_by_the_deadline(echo_env_type):
    env = echo_env_type(reset_s=3600, limits=Limits(episode_s=0.05))
    with pytest.raises(EnvError, match=r"EchoEnv\.reset: not done within 0\.05 s"):
        env.reset(seed=1)


def test_without_an_oracle_says_so(echo_env_type):
    with pytest.raises(EnvError, match="has no oracle"):
        echo_env_type().oracle(skill=1.0, rng=np.random.default_rng(0))


async def test_same_world_both_ways(echo_env_type):
    first = (await echo_env_type().areset(seed=5)).messages[0].text
    observation, _ = await asyncio.to_thread(echo_env_type().reset, seed=5)
    assert observation == first


def test_vector_environments_play_it(echo_env_type):
    """Each slot is reset once per episode, and one slot's end does not touch the other."""
    envs = [echo_env_type(), echo_env_type()]
    vector = gymnasium.vector.SyncVectorEnv([lambda env=env: env for env in envs])
    vector.reset(seed=[1, 2])
    for _ in range(5):
        _, _, terminated, _, _ = vector.step(["answer", json.dumps({"role": "assistant", "tool_calls": [{}]})])
        assert terminated.tolist() == [True, False]
        vector.step(["ignored", json.dumps({"role": "assistant", "tool_calls": [{}]})])
    assert [env.num_resets for env in envs] == [6, 1]
    vector.close()
