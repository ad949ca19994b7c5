"""A small environment without a box, and a module of foreign environments that a child process can import."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.tools import Tool, ToolSchema, Toolset
from driftgym.types import Message, TrajectoryStatus

FOREIGN_MODULE = '''
import os
import time

import gymnasium
from gymnasium.spaces import Box, Discrete, Text


class Guess(gymnasium.Env):
    """Guess a digit within three tries; counts its resets and says so."""

    observation_space = Text(max_length=100, charset="abcdefghijklmnopqrstuvwxyz0123456789 .:")
    action_space = Discrete(10)

    def __init__(self, answer=None, misbehave=None):
        self._given, self._misbehave, self._num_resets = answer, misbehave, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_resets += 1
        self._tries = 0
        self._answer = int(self.np_random.integers(10)) if self._given is None else self._given
        print("noise on standard output")
        return "guess a digit", {"num_resets": self._num_resets, "options": options}

    def step(self, action):
        if self._misbehave == "hang":
            time.sleep(3600)
        if self._misbehave == "raise":
            raise RuntimeError("it broke")
        if self._misbehave == "crash":
            os._exit(7)
        self._tries += 1
        hit = action == self._answer
        text = "right" if hit else "too low" if action < self._answer else "too high"
        return text, float(hit), hit, not hit and self._tries == 3, {"tries": self._tries}


class Arm(Guess):
    action_space = Box(-1, 1, shape=(2,))


class Yes:
    def observation(self, observation):
        return "<" + observation + ">"

    def action(self, text):
        if text != "yes":
            raise ValueError("say yes")
        return 3


gymnasium.register("foreign/Guess-v0", entry_point=Guess)
gymnasium.register("foreign/Arm-v0", entry_point=Arm)
'''


@pytest.fixture
def foreign_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that registers `foreign/Guess-v0`, importable in child processes only."""
    (tmp_path / "foreign_envs.py").write_text(FOREIGN_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "foreign_envs"


class EchoEnv(ToolEnv):
    """Says a word; the agent may call `echo`, and wins by answering with the word."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        render_mode: str | None = None,
        reset_s: float = 0.0,
        leaks: bool = False,
        sandboxes: Any = None,
    ) -> None:
        super().__init__(limits=limits, render_mode=render_mode)
        self.sandboxes = sandboxes
        self.reset_s = reset_s
        self.leaks = leaks
        self.num_closed = 0
        self.num_resets = 0
        self.broken = False
        schema = ToolSchema(
            name="echo",
            description="Says it again.",
            parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        )
        self._toolset = Toolset([Tool(schema=schema, run=self._echo)], limits=self.limits)
        self._word = ""
        self._answer = ""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return self._toolset.schemas

    @property
    def is_broken(self) -> bool:
        return self.broken

    async def _echo(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        return str(arguments["text"])

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        await asyncio.sleep(self.reset_s)
        rng = np.random.default_rng(self.episode_seed(seed))
        self.num_resets += 1
        suffix = str(self.num_resets) if self.leaks else ""
        self._word = f"word{int(rng.integers(1000))}{suffix}"
        self._answer = ""
        return ResetResult(messages=(Message(role="user", content=f"Say {self._word}"),), info={"deep": {"a": [1]}})

    async def astep(self, action: Message) -> StepResult:
        if not action.tool_calls:
            self._answer = action.text
            return StepResult(messages=(), terminated=True)
        replies = await self._toolset.run(action.tool_calls)
        return StepResult(messages=replies.messages, events=replies.events)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        hit = float(self._answer == self._word)
        return Grade(reward=hit, parts={"word": hit})

    async def aclose(self) -> None:
        self.num_closed += 1


@pytest.fixture
def echo_env_type() -> type[EchoEnv]:
    """The class of the small environment."""
    return EchoEnv


@pytest.fixture
def registered():
    """Registers environments with Gymnasium for one test."""
    added = []

    def register(env_id: str, **arguments: Any) -> str:
        gymnasium.register(env_id, **arguments)
        added.append(env_id)
        return env_id

    yield register
    for env_id in added:
        gymnasium.registry.pop(env_id, None)
