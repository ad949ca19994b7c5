"""What a worker process does with the id of an environment; importable there by name."""

from multiprocessing.queues import Queue

from driftgym.envs.registry import make_env
from driftgym.errors import ConfigError


def make_in_child(env_id: str, answers: "Queue[str]") -> None:
    """Puts the name of the environment's type, or the error, into `answers`."""
    try:
        answers.put(type(make_env(env_id)).__name__)
    except ConfigError as error:
        answers.put(str(error))
