"""Playing a foreign Gymnasium environment in text: what happens within the child process of `ProcessEnv`."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium

from driftgym.envs.registry import check_env_id
from driftgym.envs.spaces import Unicode, scalar_text
from driftgym.errors import ConfigError, EnvError


class Formatter(Protocol):
    """Turns the texts of the agent into actions, and observations into texts."""

    def observation(self, observation: Any) -> str:
        """The text of an observation."""
        ...

    def action(self, text: str) -> Any:
        """The action that `text` stands for. Raises ValueError when it stands for none: the agent reads why."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the foreign environment did.

    >>> Reply(observation="Pick 0 or 1.").reward
    0.0
    """

    observation: str
    """Its observation, or why the action was none."""
    reward: float = 0.0
    """The reward of the step."""
    terminated: bool = False
    """Its own `terminated`."""
    truncated: bool = False
    """Its own `truncated`."""
    was_refused: bool = False
    """True when the text stood for no action: the environment was not stepped."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its `info`."""


class SpaceFormatter:
    """Texts for environments of text, and for those whose action is one of a few numbers."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Formats for `env`. Raises ConfigError when its actions are neither texts nor numbers."""
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete | Unicode):
            raise ConfigError(
                f"driftgym/Process-v0: actions of {space} need a formatter: formatter='my_package.module:MyFormatter'"
            )
        self._space = space

    def observation(self, observation: Any) -> str:
        """The text itself, or what Python prints for anything else."""
        return observation if isinstance(observation, str) else str(observation)

    def action(self, text: str) -> Any:
        """The text itself, or the whole number that it says. Raises ValueError for one outside the space."""
        action: Any = text
        if isinstance(self._space, gymnasium.spaces.Discrete):
            try:
                action = int(text.strip())
            except ValueError:
                raise ValueError(f"answer with one whole number, got {text[:40]!r}") from None
        if not self._space.contains(action):
            raise ValueError(f"not an action of {self._space}: {text[:40]!r}")
        return action


class Player:
    """The environment that this process plays."""

    def __init__(self) -> None:
        """None yet."""
        self._env: gymnasium.Env[Any, Any] | None = None
        self._formatter: Formatter | None = None

    def make(self, env_id: str, env_kwargs: Mapping[str, Any], formatter: str | None) -> None:
        """Makes `env_id`. Raises ConfigError when it, or the formatter, cannot be found."""
        check_env_id(env_id)
        self._env = gymnasium.make(env_id, **env_kwargs)
        self._formatter = _load(formatter)() if formatter else SpaceFormatter(self._env)

    def reset(self, seed: int | None, options: Mapping[str, Any] | None) -> Reply:
        """Begins an episode."""
        env, formatter = self._parts()
        observation, info = env.reset(seed=seed, options=dict(options) if options else None)
        return Reply(observation=scalar_text(formatter.observation(observation)), info=dict(info))

    def step(self, text: str) -> Reply:
        """Plays the action that `text` stands for, if it stands for one."""
        env, formatter = self._parts()
        try:
            action = formatter.action(text)
        except ValueError as error:
            return Reply(observation=scalar_text(f"error: {error}"), was_refused=True)
        observation, reward, terminated, truncated, info = env.step(action)
        return Reply(
            observation=scalar_text(formatter.observation(observation)),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=dict(info),
        )

    def close(self) -> None:
        """Closes the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _parts(self) -> tuple[gymnasium.Env[Any, Any], Formatter]:
        if self._env is None or self._formatter is None:
            raise EnvError("the child process has no environment yet")
        return self._env, self._formatter


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"driftgym/Process-v0: formatter {path!r} cannot be loaded ({error})") from None
