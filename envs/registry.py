"""Finding environments by id, and making one that a run can play.

An id is Gymnasium's. It may name the module that registers it, `my_package.envs:my/Env-v0`, so that any process
can find it. Gymnasium itself knows driftgym's environments once `driftgym.envs` is imported, or by the id
`driftgym.envs:driftgym/Lookup-v0`.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from driftgym.config import Limits
from driftgym.envs.base import ToolEnv
from driftgym.errors import ConfigError
from driftgym.sandboxes.base import SandboxProvider, SandboxSpec

_ENTRY_POINTS = {
    "driftgym/Lookup-v0": "driftgym.envs.lookup.env:LookupEnv",
    "driftgym/Process-v0": "driftgym.envs.adapters.gymnasium_process:ProcessEnv",
}
# They watch and change nothing, so that leaving them out changes nothing either.
_PASSIVE_WRAPPERS = (OrderEnforcing, PassiveEnvChecker)


def register_envs() -> None:
    """Tells Gymnasium of driftgym's own environments, without importing them. Nothing happens the second time."""
    for env_id, entry_point in _ENTRY_POINTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=entry_point)


def list_envs() -> tuple[str, ...]:
    """The ids of the environments that a run can play, of those registered in this process, in order."""
    return tuple(sorted(env_id for env_id, spec in gymnasium.registry.items() if _is_tool_env(env_id, spec)))


def _is_tool_env(env_id: str, spec: EnvSpec) -> bool:
    """Judged without importing: Gymnasium's own list has entries whose import is heavy, or fails."""
    if env_id in _ENTRY_POINTS:
        return True
    creator: Any = spec.entry_point
    if isinstance(creator, str):
        module, _, name = creator.partition(":")
        creator = getattr(sys.modules.get(module), name, None)
    return isinstance(creator, type) and issubclass(creator, ToolEnv)


def check_env_id(env_id: str) -> EnvSpec:
    """What is registered under `env_id`.

    Raises:
        ConfigError: nothing is, or the module that the id names cannot be imported. One line, with close matches.
    """
    module, colon, name = env_id.rpartition(":")
    if colon:
        _import_for(env_id, module)
    spec = gymnasium.registry.get(name)
    if spec is not None:
        return spec
    close = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(list_envs())}"
    raise ConfigError(
        f"environment {env_id!r}: not registered in this process; {hint} An environment of your own is named with "
        "the module that registers it: 'my_package.envs:my/Env-v0'"
    )


def _import_for(env_id: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        problem = f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError(f"environment {env_id!r}: module {module!r} cannot be imported ({problem})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def make_env(
    env_id: str,
    *,
    sandboxes: SandboxProvider | None = None,
    sandbox_spec: SandboxSpec | None = None,
    limits: Limits | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ToolEnv:
    """The unwrapped environment `env_id`, made through Gymnasium.

    Args:
        env_id: may name a module, as in `my_package.envs:my/Env-v0`.
        sandboxes: where the environment gets its boxes; it does not close the provider. None leaves it to the
            environment, and so does an environment whose constructor does not name the argument.
        sandbox_spec: what a box may use; likewise.
        limits: the deadlines; likewise.
        kwargs: what else the constructor is given.

    Raises:
        ConfigError: the id is unknown, an argument is not one of the constructor's or is refused by it, what it
            makes is no ToolEnv, or it is wrapped in something that changes what it does.
    """
    spec = check_env_id(env_id)
    given = dict(kwargs or {})
    creator = _creator(spec)
    _check_arguments(env_id, creator, given)
    offered: dict[str, Any] = {"sandboxes": sandboxes, "sandbox_spec": sandbox_spec, "limits": limits}
    parts: dict[str, Any] = {name: part for name, part in offered.items() if part is not None and _names(creator, name)}
    try:
        made = gymnasium.make(spec, **given, **parts)
    except (TypeError, ValueError) as error:  # a ValidationError of pydantic is a ValueError
        raise ConfigError(f"environment {env_id!r}: refuses its arguments ({_one_line(error)})") from error
    except (gymnasium.error.Error, ImportError, OSError) as error:
        problem = f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError(f"environment {env_id!r}: cannot be made here ({problem})") from error
    env = _unwrapped(env_id, made)
    if env.spec is not None:
        # What is left is what Gymnasium can copy and make again.
        for name in parts:
            env.spec.kwargs.pop(name, None)
    return env


def _creator(spec: EnvSpec) -> Callable[..., Any]:
    try:
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    except Exception as error:  # whatever its module raises
        problem = f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError(
            f"environment {spec.id!r}: entry point {spec.entry_point!r} cannot be loaded ({problem})"
        ) from error
    if creator is None:
        raise ConfigError(f"environment {spec.id!r}: has no entry point for a single environment")
    return creator


def _names(creator: Callable[..., Any], argument: str) -> bool:
    return argument in inspect.signature(creator).parameters


def _check_arguments(env_id: str, creator: Callable[..., Any], given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(creator).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(parameters) or 'none'}"
            raise ConfigError(f"environment {env_id!r}: unknown argument {name!r}; {hint}")


def _unwrapped(env_id: str, made: gymnasium.Env[Any, Any]) -> ToolEnv:
    env = made.unwrapped
    if not isinstance(env, ToolEnv):
        made.close()
        raise ConfigError(
            f"environment {env_id!r}: {type(env).__name__} is not a driftgym.envs.base.ToolEnv; any Gymnasium "
            f"environment can be played through 'driftgym/Process-v0' with env_id={env_id!r}"
        )
    layer: Any = made
    while isinstance(layer, gymnasium.Wrapper):
        if type(layer) not in _PASSIVE_WRAPPERS:
            made.close()
            raise ConfigError(
                f"environment {env_id!r}: wrapped in {type(layer).__name__}, which changes what it does and "
                "which a run would leave out; register it without (no max_episode_steps, no additional_wrappers)"
            )
        layer = layer.env
    return env
