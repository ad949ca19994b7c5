"""`check_tool_env`: is an environment sound enough to train on? What `driftgym env check` says."""

import asyncio
import re
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from driftgym.config import Limits
from driftgym.envs.base import ToolEnv
from driftgym.envs.bridge import run_blocking
from driftgym.envs.registry import make_env
from driftgym.envs.tools import argument_check
from driftgym.errors import ConfigError
from driftgym.types import MAX_REWARD, Message, ToolCall, TrajectoryStatus

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEED, _OTHER_SEED = 123, 456
_MAX_ORACLE_TURNS = 16
_SCORED = tuple(status for status in TrajectoryStatus if status.is_scored)


def check_tool_env(env_id: str, *, kwargs: Mapping[str, Any] | None = None, limits: Limits | None = None) -> list[str]:
    """What is wrong with the environment `env_id`, one line each; empty when nothing was found.

    Runs Gymnasium's own checker, with its warnings counted as findings, then looks at what a run relies on: schemas
    of tools, seeds that give the same world again, the grade for each scored status, no state that leaks from one
    episode to the next, and closing twice. Must not be called from an event loop.

    Raises:
        ConfigError: there is no such environment, or it refuses its arguments.
    """
    limits = limits or Limits()
    findings = _findings_of_gymnasium(make_env(env_id, limits=limits, kwargs=kwargs))
    first, second = (make_env(env_id, limits=limits, kwargs=kwargs) for _ in range(2))
    checks = _Checks(first, second)
    try:
        return findings + run_blocking(checks.run(), timeout_s=limits.episode_s, what=f"checking {env_id}")
    except Exception as error:  # what the environment's own code raises is a finding too
        where = f" ({traceback.format_tb(error.__traceback__)[-1].splitlines()[0].strip()})"
        return [*findings, *checks.findings, f"{type(error).__name__}: {error}{where}"]
    finally:
        for env in (first, second):
            env.close()


def _findings_of_gymnasium(env: ToolEnv) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env)
        except Exception as error:  # its assertions, and what the environment's own code raises
            return [f"gymnasium's check_env: {type(error).__name__}: {error}"]
        finally:
            env.close()
    return [f"gymnasium's check_env warns: {warning.message}" for warning in caught]


class _Checks:
    """The checks of the async core, on two environments that should not differ."""

    def __init__(self, first: ToolEnv, second: ToolEnv) -> None:
        self.findings: list[str] = []
        self._first = first
        self._second = second

    async def run(self) -> list[str]:
        """All of them."""
        await self._check_seeds()
        self._check_schemas()
        await self._check_unknown_tool()
        await self._check_leaks()
        await self._check_grades()
        await self._check_close()
        return self.findings

    def _say(self, finding: str) -> None:
        self.findings.append(finding)

    async def _check_seeds(self) -> None:
        first = await self._first.areset(seed=_SEED)
        if not first.messages:
            self._say("areset: returns no message")
        if first.messages != (await self._second.areset(seed=_SEED)).messages:
            self._say("areset: the same seed gives other messages in another instance")
        if first.messages != (await self._first.areset(seed=_SEED)).messages:
            self._say("areset: the same seed gives other messages the second time")

    def _check_schemas(self) -> None:
        names = [schema.name for schema in self._first.tools]
        if len(set(names)) < len(names):
            self._say(f"tools: names must differ, got {names}")
        for schema in self._first.tools:
            if not _TOOL_NAME.fullmatch(schema.name):
                self._say(f"tool {schema.name!r}: a name has 1 to 64 letters, digits, '_' and '-'")
            if not schema.description:
                self._say(f"tool {schema.name!r}: has no description")
            try:
                argument_check(schema)
            except ConfigError as error:
                self._say(str(error))

    async def _check_unknown_tool(self) -> None:
        """A call of an unknown tool is the agent's mistake: it must be answered, under its id, and go on."""
        await self._first.areset(seed=_SEED)
        call = ToolCall(call_id="call_x", name="no_such_tool", arguments={})
        result = await self._first.astep(Message(role="assistant", tool_calls=(call,)))
        answered = [message.tool_call_id for message in result.messages if message.role == "tool"]
        if answered != [call.call_id] or result.terminated:
            self._say("astep: an unknown tool must be answered by one tool message with the call's id, and go on")
        if not result.events.get("unknown_tool"):
            self._say("astep: an unknown tool must be counted in events as unknown_tool")

    async def _check_leaks(self) -> None:
        """An episode is the same in a used environment as in a fresh one."""
        await self._play(self._first, _OTHER_SEED)
        used = await self._play(self._first, _SEED)
        fresh = await self._play(self._second, _SEED)
        if used != fresh:
            self._say("areset: an episode goes otherwise after another was played: state leaks, or chance has no seed")

    async def _play(self, env: ToolEnv, seed: int) -> list[Any]:
        """All that can be seen of an episode of `seed`: played by the oracle, or else by one fixed answer."""
        seen: list[Any] = [(await env.areset(seed=seed)).messages, env.tools]
        rng = np.random.default_rng(seed)
        for _ in range(_MAX_ORACLE_TURNS):
            result = await env.astep(self._next_action(env, rng))
            seen.append((result.messages, result.terminated, result.reward, dict(result.events)))
            if result.terminated:
                break
        seen.append(await env.grade(TrajectoryStatus.COMPLETED))
        return seen

    def _next_action(self, env: ToolEnv, rng: np.random.Generator) -> Message:
        if not env.has_oracle:
            return Message(role="assistant", content="0")
        return env.oracle(skill=1.0, rng=rng)

    async def _check_grades(self) -> None:
        for status in _SCORED:
            await self._first.areset(seed=_SEED)
            grade = await self._first.grade(status)
            if not all(abs(value) <= MAX_REWARD for value in (grade.reward, *grade.parts.values())):
                self._say(f"grade({status}): not finite, or above {MAX_REWARD:g}: {grade}")
            if grade != await self._first.grade(status):
                self._say(f"grade({status}): not the same when asked again")

    async def _check_close(self) -> None:
        for env in (self._first, self._second):
            async with asyncio.timeout(2 * env.limits.close_s):
                await env.aclose()
                await env.aclose()
