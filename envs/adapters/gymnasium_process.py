"""`ProcessEnv`: a foreign, synchronous Gymnasium environment, in a process that can be killed."""

import pickle
from collections.abc import Mapping
from typing import Any

import pydantic

from driftgym.config import Config, Limits, parse_config
from driftgym.envs.adapters.play import Reply
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.tools import ToolSchema, Toolset
from driftgym.errors import ConfigError, EnvError
from driftgym.processes import ChildCallError, ChildDiedError, ChildProcess
from driftgym.types import Message, TrajectoryStatus

_CHILD_MODULE = "driftgym.envs.adapters.process_child"


class ProcessConfig(Config):
    """The arguments of `driftgym/Process-v0`."""

    env_id: str = pydantic.Field(description="Gymnasium id; `my_package.envs:my/Env-v0` names who registers it.")
    env_kwargs: dict[str, Any] = pydantic.Field(default={}, description="Arguments of its constructor.")
    formatter: str | None = pydantic.Field(
        None, description="`module:Class` of a Formatter; not needed for texts and for a choice of numbers."
    )
    instructions: str = pydantic.Field("", description="System message that begins each episode; none when empty.")


class ProcessEnv(ToolEnv):
    """Plays a foreign environment in a child process.

    What the agent says is the action; an answer that stands for no action is told so, and is not played. The episode
    ends when the environment says `terminated` or `truncated` (`info["truncated"]` tells); its last observation is
    part of the last step. The reward is the sum of the environment's rewards. There are no tools.

    One child plays one episode after the other, each begun with exactly one `reset`. A call that runs past
    `limits.tool_call_s` kills the child and is an EnvError, as are an exception and a crash; the next episode starts
    a new child.
    """

    def __init__(self, *, limits: Limits | None = None, render_mode: str | None = None, **settings: Any) -> None:
        """An environment that starts its child at the first `areset`.

        Args:
            limits: the deadlines: `sandbox_start_s` for starting the child and making its environment,
                `tool_call_s` for a reset and a step.
            render_mode: as in `ToolEnv`.
            settings: the fields of `ProcessConfig`.

        Raises:
            ConfigError: a setting is unknown or missing, or `env_kwargs` cannot be sent to a process.
        """
        super().__init__(limits=limits, render_mode=render_mode)
        self.config = parse_config(ProcessConfig, settings, source="driftgym/Process-v0")
        _check_can_be_sent(self.config)
        self._no_tools = Toolset((), limits=self.limits)
        self._child: ChildProcess | None = None
        self._return = 0.0

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """None."""
        return ()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """One `reset` of the foreign environment, with `seed` and `options`. Raises as in `ToolEnv`, and ConfigError
        when the child cannot find the environment."""
        seed = self.episode_seed(seed)
        self._return = 0.0
        if self._child is None or not self._child.is_alive:
            await self._start()
        reply = await self._call("reset", seed, dict(options) if options else None)
        system = self.config.instructions
        messages = (Message(role="system", content=system),) if system else ()
        return ResetResult(messages=(*messages, Message(role="user", content=reply.observation)), info=reply.info)

    async def _start(self) -> None:
        await self.aclose()
        self._child = await ChildProcess.start(_CHILD_MODULE, name=f"environment {self.config.env_id}")
        config = self.config
        await self._call(
            "make",
            config.env_id,
            config.env_kwargs,
            config.formatter,
            timeout_s=self.limits.sandbox_start_s,
        )

    async def astep(self, action: Message) -> StepResult:
        """Plays what `action` says. Raises EnvError when the foreign environment fails, ends or hangs."""
        if action.tool_calls:
            replies = await self._no_tools.run(action.tool_calls)
            return StepResult(messages=replies.messages, events=replies.events)
        reply = await self._call("step", action.text)
        self._return += reply.reward
        return StepResult(
            messages=(Message(role="user", content=reply.observation),),
            terminated=reply.terminated or reply.truncated,
            reward=reply.reward,
            events={"policy_error": 1} if reply.was_refused else {},
            info={**reply.info, "truncated": True} if reply.truncated else reply.info,
        )

    async def grade(self, status: TrajectoryStatus) -> Grade:
        """The sum of the rewards so far."""
        return Grade(reward=self._return, parts={"return": self._return})

    async def aclose(self) -> None:
        """Ends the child. Safe to call twice."""
        child, self._child = self._child, None
        if child is not None:
            await child.close(timeout_s=self.limits.close_s / 2)

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Reply:
        """The child's reply; a child that gave none is gone afterwards."""
        if self._child is None:
            raise EnvError(f"environment {self.config.env_id}: {method} before areset")
        timeout_s = timeout_s or self.limits.tool_call_s
        is_sound = False
        try:
            reply: Reply = await self._child.call(method, *args, timeout_s=timeout_s)
            is_sound = True
            return reply
        except TimeoutError as error:
            raise EnvError(
                f"environment {self.config.env_id}: {method} did not end within {timeout_s:g} s; its process was killed"
            ) from error
        except (ChildDiedError, ChildCallError) as error:
            raise EnvError(str(error)) from error
        finally:
            if not is_sound:
                await self._end_child()

    async def _end_child(self) -> None:
        """A child whose state is unknown is killed, and waited for."""
        if self._child is not None:
            self._child.kill()
        await self.aclose()


def _check_can_be_sent(config: ProcessConfig) -> None:
    try:
        pickle.dumps(config.env_kwargs)
    except Exception as error:
        raise ConfigError(
            f"driftgym/Process-v0: env_kwargs of {config.env_id!r} cannot be sent to a process ({error}); name a "
            "function by 'module:name' instead, and look it up in the environment"
        ) from None
