"""`RunConfig`: everything that a training run is made of, checked as a whole before any work starts."""

import datetime
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pydantic
import yaml

from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.agents.rollout import RolloutConfig
from driftgym.agents.tool_agent import AgentConfig
from driftgym.config import Config, Limits, dump_config, load_config
from driftgym.errors import ConfigError
from driftgym.metrics import MetricsConfig
from driftgym.sandboxes.base import SandboxConfig
from driftgym.sandboxes.pool import check_pool
from driftgym.trainer.durable import flush_to_disk
from driftgym.trainer.learner_config import processes_problem
from driftgym.trainer.trainer_config import TrainerConfig
from driftgym.trainer.training_client import LearnerConfig, ModelConfig, WarmupConfig

RESOLVED_NAME = "config.resolved.yaml"
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without hard links say
_PARTS_OF_A_RUN = ("journal.sqlite", "metrics.jsonl", "summary.json", "checkpoints", "trajectories")


class EnvConfig(Config):
    """Which environment is played."""

    id: str = pydantic.Field(description="A Gymnasium id; see `driftgym env list`.")
    kwargs: dict[str, Any] = pydantic.Field({}, description="Given to the environment's constructor.")


class DemonstrationConfig(Config):
    """The demonstrations that the warm-up trains on, played by the environment's own oracle."""

    num_episodes: int = pydantic.Field(256, gt=0)
    skill: float = pydantic.Field(
        0.0, ge=0, le=1, description="How often the oracle chooses the right tool; otherwise another, at random."
    )


class RunConfig(Config):
    """A training run."""

    name: str = pydantic.Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="In the run folder's name.")
    seed: int = pydantic.Field(0, ge=0, description="Of tasks, random weights and the warm-up.")
    run_dir: Path | None = pydantic.Field(None, description="By default runs/NAME-TIME.")
    model: ModelConfig
    env: EnvConfig
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: TrainerConfig = TrainerConfig()
    warmup: WarmupConfig = WarmupConfig()
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    limits: Limits = Limits()
    metrics: MetricsConfig = MetricsConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.agent.top_p != 1.0:
            raise ValueError("agent.top_p must be 1 in training: log-probs are those of the full softmax")
        if self.agent.temperature <= 0:
            raise ValueError("agent.temperature must be above 0 in training: the policy has to explore")
        if self.agent.max_context_tokens > self.generator.max_context_tokens:
            raise ValueError(
                f"agent.max_context_tokens {self.agent.max_context_tokens} is above generator.max_context_tokens "
                f"{self.generator.max_context_tokens}: no generator would take such a prompt"
            )
        problem = self._updates_problem() or self._placement_problem() or processes_problem(self.model, self.learner)
        if problem:
            raise ValueError(problem)
        try:
            check_pool(self.sandbox.spec, self.sandbox.pool, num_boxes=self.num_slots)
        except ConfigError as error:
            slots = f"trainer.max_in_flight_groups x group_size = {self.num_slots} episodes play at once"
            raise ValueError(f"{error} ({slots})") from None
        return self

    def _updates_problem(self) -> str | None:
        """What does not go together of that which concerns new weights."""
        if self.generator.iteration_tokens is not None and self.trainer.max_lag < 1:
            return (
                "generator.iteration_tokens parks long answers until the next weights come, so that their tokens are "
                "of several versions: set trainer.max_lag to 1 at least, or iteration_tokens to null"
            )
        if self.generator.keep_kv and self.trainer.weight_update != "in_flight":
            return (
                f"generator.keep_kv goes with trainer.weight_update: in_flight alone, not with "
                f"{self.trainer.weight_update}; set it to false"
            )
        return None

    def _placement_problem(self) -> str | None:
        """Why the learner's process cannot generate, where it is to."""
        generator = self.generator
        if self.trainer.placement != "colocated":
            return None
        if generator.kind != "embedded":
            return (
                f"trainer.placement: colocated goes with generator.kind: embedded; a server of kind {generator.kind} "
                "cannot share the learner's weights: set placement to disaggregated"
            )
        if generator.num_servers != 1:
            return (
                f"trainer.placement: colocated has one engine, in the learner's process: set generator.num_servers "
                f"from {generator.num_servers} to 1"
            )
        if self.learner.num_processes != 1:
            return (
                f"trainer.placement: colocated generates with the weights of one process: set learner.num_processes "
                f"from {self.learner.num_processes} to 1, or placement to disaggregated"
            )
        if generator.device != "cpu":
            return (
                f"trainer.placement: colocated generates where the learner is, on the CPU: set generator.device from "
                f"{generator.device} to cpu"
            )
        if self.model.computes_with_copies:
            return (
                f"trainer.placement: colocated generates with the weights that are trained, which are float32 without "
                f"model.lora: set model.dtype from {self.model.dtype} to float32, or placement to disaggregated"
            )
        return None

    @property
    def num_slots(self) -> int:
        """How many episodes are played at once, each in an environment of its own."""
        return self.trainer.max_in_flight_groups * self.trainer.group_size


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run in the YAML file `path`. A relative `model.path` starts at the file's folder.

    Raises:
        ConfigError: see `config.load_config`.
    """
    config = load_config(RunConfig, path, overrides)
    return config.model_copy(update={"model": _anchored(config.model, path.parent)})


def load_resolved(run_dir: Path) -> tuple[RunConfig, Path]:
    """The configuration that the run in `run_dir` was started with, and the absolute path of that folder.

    Raises:
        ConfigError: there is no run.
    """
    run_dir = run_dir.resolve()
    path = run_dir / RESOLVED_NAME
    if not path.is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run ({RESOLVED_NAME} is missing)")
    return load_config(RunConfig, path).model_copy(update={"run_dir": run_dir}), run_dir


def check_run_dir(config: RunConfig) -> None:
    """Raises ConfigError when it is clear already that the run folder cannot be made, or holds (parts of) a run."""
    run_dir = (config.run_dir or Path("runs")).resolve()
    try:
        problem = _problem_of(run_dir)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
    if problem:
        raise ConfigError(f"run_dir: {run_dir}: {problem}; choose another folder")


def _problem_of(run_dir: Path) -> str | None:
    if (run_dir / RESOLVED_NAME).exists():
        return "holds a run already, to go on with by --resume"
    parts = [name for name in _PARTS_OF_A_RUN if (run_dir / name).exists()]
    if parts:
        return f"holds {parts[0]} of a run whose {RESOLVED_NAME} is missing"
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"cannot be made, since {existing} {'is not writable' if existing.is_dir() else 'is not a folder'}"


def make_run_dir(config: RunConfig) -> Path:
    """A new run folder, the resolved configuration in it. What is made is made before any other work.

    Raises:
        ConfigError: it cannot be written, or holds a run already.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = (config.run_dir or Path("runs") / f"{config.name}-{stamp}").resolve()
    config = config.model_copy(update={"run_dir": run_dir})
    check_run_dir(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Whole, and before anything else: what a kill leaves is a run to go on with, or nothing in the way of one.
        _write_once(run_dir / RESOLVED_NAME, dump_config(config))
        for folder in (run_dir / "checkpoints", run_dir / "trajectories"):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        check_run_dir(config)  # another process may have been first
        raise ConfigError(f"run_dir: {run_dir}: cannot be written ({error.strerror}); choose another folder") from None
    return run_dir


def _write_once(path: Path, text: str) -> None:
    """Writes a file whole, unless it is there already: of several processes, one does. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush_to_disk(temporary)
    try:
        os.link(temporary, path)  # replaces nothing, as a rename would
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        temporary.replace(path)
    finally:
        for leftover in path.parent.glob(path.name + "*.tmp"):  # of those that were killed, or came second
            leftover.unlink(missing_ok=True)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """`config` as plain values, for those who record it elsewhere."""
    settings: dict[str, Any] = yaml.safe_load(dump_config(config))
    return settings


def _anchored(model: ModelConfig, folder: Path) -> ModelConfig:
    """`model` with its relative path made absolute; a name that is no path stays."""
    path = (folder / Path(model.path).expanduser()).resolve()
    return model if model.path == "smollm2" else model.model_copy(update={"path": str(path)})
