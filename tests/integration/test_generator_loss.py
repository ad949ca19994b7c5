"""Servers are killed in the middle of 200 episodes, twice, and one is added: no episode notices but by its clock."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

from driftgym.agents.base import AgentTurn
from driftgym.agents.generators.launch import EmbeddedServer, GeneratorConfig
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.agents.generators.watch import WatchOptions
from driftgym.agents.rollout import RolloutConfig, run_group
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tools import ToolSchema
from driftgym.types import (
    Message,
    SamplingParams,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    int32_array,
)

NUM_EPISODES = 200
NUM_TURNS = 3
TURN_TOKENS = 48
CHUNK_TOKENS = 16
NUM_SLICES = TURN_TOKENS // CHUNK_TOKENS
CONFIG = GeneratorConfig(max_batch_size=96, max_context_tokens=256)
CALL = Message(role="assistant", tool_calls=(ToolCall(call_id="call_0", name="wait", arguments={}),))


class WaitingEnv(ToolEnv):
    """Its tool takes a moment; after some turns the episode is over."""

    def __init__(self) -> None:
        super().__init__()
        self._num_turns = 0

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return ()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        self._num_turns = 0
        return ResetResult(messages=(Message(role="user", content="Go on."),))

    async def astep(self, action: Message) -> StepResult:
        await asyncio.sleep(0.05)
        self._num_turns += 1
        return StepResult(
            messages=(Message(role="tool", content="done", tool_call_id="call_0"),),
            terminated=self._num_turns == NUM_TURNS,
        )

    async def grade(self, status: TrajectoryStatus) -> Grade:
        return Grade(reward=1.0)

    async def aclose(self) -> None:
        return None


class RawAgent:
    """Speaks random tokens, without a tokenizer: each prompt is the last one, its answer, and two tokens more."""

    def __init__(self, pool: GeneratorPool) -> None:
        self.pool = pool

    def start(self, *, session_id: str, tools: Sequence[ToolSchema]) -> "RawConversation":
        return RawConversation(self.pool, session_id)


class RawConversation:
    """One episode of a `RawAgent`."""

    def __init__(self, pool: GeneratorPool, session_id: str) -> None:
        self._pool = pool
        self._session_id = session_id
        self._ids: list[int] = []
        self._num_turns = 0

    async def act(self, messages: Sequence[Message], *, deadline_s: float, min_policy_version: int = 0) -> AgentTurn:
        new = [int(self._session_id.split("-")[1]) % VOCAB_SIZE, self._num_turns]
        self._ids += new
        completion = await self._pool.generate(
            self._ids,
            SamplingParams(max_tokens=TURN_TOKENS),
            request_id=f"{self._session_id}-{self._num_turns}",
            session_id=self._session_id,
            deadline_s=deadline_s,
            min_policy_version=min_policy_version,
        )
        self._ids = [*self._ids, *completion.token_ids.tolist()]
        self._num_turns += 1
        return AgentTurn(
            new_prompt_token_ids=int32_array(new), completion=completion, action=CALL, rewrites_context=False
        )


class Servers:
    """Embedded servers, all with the same weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: dict[str, int] = {}

    async def start(self) -> SGLangGenerator:
        server = await EmbeddedServer.start(
            self._folder, CONFIG, incarnation=1, policy_version=4, timeout_s=100, dtype="float32"
        )
        self._pids[server.url] = server.pid
        return SGLangGenerator(server.url, incarnation=1, max_concurrency=NUM_EPISODES, server=server)

    def kill(self, generator: SGLangGenerator) -> None:
        os.kill(self._pids[generator.url], signal.SIGKILL)


def play(agent: RawAgent, slots: EnvSlots) -> "asyncio.Task[TrajectoryGroup]":
    return asyncio.create_task(
        run_group(
            Task(task_id="t", env_id="e"),
            group_id="g",
            group_size=NUM_EPISODES,
            agent=agent,
            slots=slots,
            limits=Limits(generation_s=300.0),
            config=RolloutConfig(max_turns=NUM_TURNS, max_attempts=1),
            min_policy_version=4,
        )
    )


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not is_so():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_servers_are_killed_and_added_under_200_episodes(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", seed=0)
    servers = Servers(folder)
    events: list[str] = []
    engines = await asyncio.gather(*(servers.start() for _ in range(3)))
    pool = GeneratorPool(
        engines,
        policy_version=4,
        chunk_tokens=CHUNK_TOKENS,
        watch=WatchOptions(interval_s=1.0, timeout_s=30.0),  # who was killed refuses at once; who is slow is well
        on_event=lambda event, _: events.append(event),
    )
    slots = EnvSlots(WaitingEnv, num_slots=NUM_EPISODES)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        stack.push_async_callback(slots.close)
        playing = play(RawAgent(pool), slots)
        whole = NUM_EPISODES * NUM_TURNS * NUM_SLICES
        await until(lambda: pool.counts.num_slices > whole // 5)
        servers.kill(engines[0])
        await until(lambda: pool.names == ("1", "2"))
        joining = asyncio.create_task(servers.start())
        await until(lambda: pool.counts.num_slices > whole // 2 or playing.done())
        servers.kill(engines[1])
        await until(lambda: pool.names == ("2",))
        await pool.add(await joining, name="added")
        group = await playing
        health = await pool.health()
    check(group.trajectories, pool)
    assert (health.num_running, health.num_queued) == (0, 0)
    assert events == ["generator_lost", "generator_lost", "generator_joined"]
    check_logprobs(group.trajectories, folder)


def check(trajectories: Sequence[Trajectory], pool: GeneratorPool) -> None:
    """Every episode ended, none twice; each token has a log-prob and a version; what was lost is a slice each time."""
    assert len({each.trajectory_id for each in trajectories}) == NUM_EPISODES
    assert {(each.status, each.attempt, len(each.turns)) for each in trajectories} == {
        (TrajectoryStatus.COMPLETED, 0, NUM_TURNS)
    }
    turns = [turn for each in trajectories for turn in each.turns]
    for turn in turns:
        completion = turn.completion
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions) == TURN_TOKENS
        assert np.isfinite(completion.logprobs).all()
        assert set(completion.policy_versions.tolist()) == {4}
    lost = [turn.completion.extras["num_slices"] - NUM_SLICES for turn in turns]
    assert max(lost) <= 2, "one slice for each of the two deaths"
    assert sum(lost) == pool.counts.num_retried > 0
    moved = [turn for turn in turns if turn.completion.extras["num_moved"]]
    print(
        f"\n{NUM_EPISODES} episodes, {len(turns)} requests, {pool.counts.num_slices} slices of {CHUNK_TOKENS} tokens: "
        f"{len(moved)} requests moved, {sum(each > 0 for each in lost)} of them lost a slice, "
        f"{sum(lost)} slices ({100 * sum(lost) / pool.counts.num_slices:.1f} %) were asked for again, at most "
        f"{max(lost)} of one request"
    )


def check_logprobs(trajectories: Sequence[Trajectory], folder: Path) -> None:
    """Answers that were written by two servers are those of one model, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    moved = [each for each in trajectories if any(turn.completion.extras["num_moved"] for turn in each.turns)]
    for trajectory in moved[:20]:
        ids, mask, told = flat(trajectory.turns)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scored = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()[np.array(mask[1:])]
        assert np.abs(scored - np.array(told)).max() < 1e-4


def flat(turns: Sequence[Turn]) -> tuple[list[int], list[bool], list[float]]:
    """The tokens of an episode, which of them were sampled, and the log-probs of those."""
    ids: list[int] = []
    mask: list[bool] = []
    told: list[float] = []
    for turn in turns:
        prompt, sampled = turn.new_prompt_token_ids.tolist(), turn.completion.token_ids.tolist()
        ids += [*prompt, *sampled]
        mask += [False] * len(prompt) + [True] * len(sampled)
        told += turn.completion.logprobs.tolist()
    return ids, mask, told
