"""The errors of driftgym. Who is at fault decides which one is raised, and what becomes of the episode.

::

    DriftgymError
    ├── ConfigError            the user's input is wrong: said in one line before any work starts, exit code 2
    ├── EpisodeError           one episode cannot go on; its siblings do
    │   ├── SandboxError       infrastructure: the box is gone or cannot be had; retried on a fresh one
    │   ├── EnvError           the environment's own code failed: the episode ends as ENV_ERROR, not retried
    │   └── GeneratorError     infrastructure: no generator answers; retried
    └── TrainingError          a training step failed: the run stops, nothing that was written is lost
        └── NotDoneError       a call of the learner was not done, since one before it failed; names that cause

A policy's own failure (malformed call, unknown tool, bad arguments) is none of these: it is an observation
that the agent reads. An exception that is not in this tree is an error too, never a score.
"""


class DriftgymError(Exception):
    """The root: every error that driftgym raises on purpose."""


class ConfigError(DriftgymError):
    """The user's input is wrong. The message is one line: file, key, and what would be right."""


class EpisodeError(DriftgymError):
    """One episode cannot go on."""


class SandboxError(EpisodeError):
    """The box is gone, or could not be had. Infrastructure: retried on a fresh one."""


class EnvError(EpisodeError):
    """The environment's own code failed. Ends the episode as ENV_ERROR; not retried."""


class GeneratorError(EpisodeError):
    """No generator gave an answer within the deadline. Infrastructure: retried."""


class TrainingError(DriftgymError):
    """A training step failed. The run stops."""


class NotDoneError(TrainingError):
    """A call of the learner was not done, since one before it failed: the message names that first cause."""
