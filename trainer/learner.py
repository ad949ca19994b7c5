"""The learner: a model, its optimizer, and the steps they take. Run as a process, it answers the trainer's calls.

`python -m driftgym.trainer.learner` speaks `driftgym.processes` on its standard input and output; the calls are those
of `training_client.TrainingClient`, after a first `start`.
"""

import copy
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from driftgym.errors import TrainingError
from driftgym.processes import serve_calls
from driftgym.trainer.adapters import adapters_of
from driftgym.trainer.batching import Row
from driftgym.trainer.gradients import PassReport, PassSettings, accumulate_gradients
from driftgym.trainer.learner_config import LearnerSpec, OptimizerConfig
from driftgym.trainer.learner_state import load_state, save_state
from driftgym.trainer.model_loading import load_model, named_weights, trained_parameters
from driftgym.trainer.models import ordinary_token_ids
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.objectives import LossSpec, token_weights
from driftgym.trainer.training_client import StepReport
from driftgym.trainer.warmup import warmup_batches, warmup_learning_rate
from driftgym.trainer.weights import WeightPublisher
from driftgym.types import Segment, WeightUpdate

_MAX_NAMED = 8
_FINAL_SHARE = 0.1  # of the learning rate, where it falls


class Learner:
    """A model that is trained. Synchronous; `policy_version` counts its optimizer steps.

    Raises:
        ConfigError: the model cannot be loaded, or cannot be trained here.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        device = torch.device("cpu")
        self._model = load_model(spec.model, spec.model_folder, seed=spec.seed, device=device)
        self.parameters = trained_parameters(self._model)
        """What training changes, by name."""
        self._optimizer = _adamw(self.parameters, spec.config.optimizer)
        loss = LossSpec(
            objective=spec.config.objective, kl=spec.config.kl, max_failure_drift=spec.config.max_failure_drift
        )
        self._settings = PassSettings(
            loss=loss,
            temperature=spec.temperature,
            max_tokens=spec.config.micro_batch_tokens,
            device=device,
        )
        self._reference: torch.nn.Module | None = None
        self._publisher: WeightPublisher | None = None
        self.policy_version = 0

    def train_step(self, segments: Sequence[Segment]) -> StepReport:
        """See TrainingClient. Without a trained token that has an advantage, weights and optimizer stay as they are."""
        started = time.perf_counter()
        rows = self._rows(segments)
        settings = replace(self._settings, reference=self._reference_policy())
        try:
            report = accumulate_gradients(self._model, rows, policy_version=self.policy_version, settings=settings)
            grad_norm = self._checked_grad_norm(report, rows)
            updates = self._moves(rows)
            learning_rate = _step_learning_rate(self._spec.config.optimizer, self.policy_version)
            if updates:
                _set_learning_rate(self._optimizer, learning_rate)
                self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        lag0_ratios = report.lag0_log_ratios().exp()
        num_sampled = sum(int(segment.loss_mask.sum()) for segment in segments)
        num_trained = sum(int(segment.train_mask.sum()) for segment in segments)
        metrics = report.metrics() | {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "num_segments": float(len(segments)),
            "num_tokens_trained": float(num_trained),
            "num_tokens_masked": float(num_sampled - num_trained),
            "update_skipped": float(not updates),
            "learner_step_s": time.perf_counter() - started,
        }
        return StepReport(
            policy_version=self.policy_version,
            metrics=metrics,
            num_lag0_tokens=len(lag0_ratios),
            lag0_ratio_sum=float(lag0_ratios.sum()),
        )

    def _moves(self, rows: Sequence[Row]) -> bool:
        """True when a trained token has a gradient."""
        if self._settings.loss.moves_without_advantage:
            return any(row.num_inputs for row in rows)
        return any(row.has_gradient for row in rows)

    def _reference_policy(self) -> torch.nn.Module | None:
        """The policy as it was before the first step, where the loss reads it; kept apart, and by checkpoints too."""
        if self._settings.loss.needs_reference and self._reference is None:
            self._reference = copy.deepcopy(self._model).requires_grad_(False).eval()
        return self._reference

    def _reference_parameters(self) -> dict[str, torch.nn.Parameter] | None:
        reference = self._reference_policy()
        if reference is None:
            return None
        parameters = dict(reference.named_parameters())
        return {name: parameters[name] for name in self.parameters}

    def warm_up(self, segments: Sequence[Segment]) -> Mapping[str, float]:
        """See TrainingClient. Uses an optimizer of its own, so that RL starts with a fresh one."""
        started = time.perf_counter()
        warmup, optimizer_config = self._spec.warmup, self._spec.config.optimizer
        optimizer = _adamw(self.parameters, optimizer_config)
        ordinary = ordinary_token_ids(self._spec.model_folder, vocab_size=self._model.config.vocab_size)
        batches = warmup_batches(segments, config=warmup, ordinary_token_ids=ordinary, seed=self._spec.seed)
        settings = PassSettings(
            loss=LossSpec(objective=ObjectiveConfig(name="reinforce")),
            temperature=self._settings.temperature,
            max_tokens=self._settings.max_tokens,
            device=self._settings.device,
        )
        losses: list[float] = []
        for step, rows in enumerate(batches):
            report = accumulate_gradients(self._model, rows, policy_version=0, settings=settings)
            self._checked_grad_norm(report, rows)
            _set_learning_rate(optimizer, warmup_learning_rate(warmup, step))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(report.loss)
        tail = losses[-max(1, len(losses) // 10) :]
        return {
            "warmup_loss_first": losses[0] if losses else 0.0,
            "warmup_loss_last": sum(tail) / max(1, len(tail)),
            "warmup_num_steps": float(len(losses)),
            "warmup_s": time.perf_counter() - started,
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by the name that it is published under; see model_loading.named_weights."""
        return named_weights(self._model)

    def publish(self, folder: Path, *, is_last: bool = False) -> WeightUpdate:
        """See TrainingClient."""
        if self._publisher is None or self._publisher.root != folder:
            self._publisher = self._new_publisher(folder)
        return self._publisher.publish(
            self.weights(), self.policy_version, adapters=adapters_of(self._model), is_last=is_last
        )

    def _new_publisher(self, folder: Path) -> WeightPublisher:
        config = json.loads(self._model.config.to_json_string())
        return WeightPublisher(
            folder,
            config=config | {"architectures": [type(self._model).__name__]},
            tokenizer_folder=self._spec.model_folder,
            incarnation=self._spec.incarnation,
            kinds=self._spec.publishes,
        )

    def save(self, folder: Path) -> None:
        """See TrainingClient."""
        save_state(
            folder,
            parameters=self.parameters,
            optimizer=self._optimizer,
            policy_version=self.policy_version,
            reference=self._reference_parameters(),
        )

    def load(self, folder: Path, *, policy_version: int) -> None:
        """See TrainingClient."""
        load_state(
            folder,
            parameters=self.parameters,
            optimizer=self._optimizer,
            policy_version=policy_version,
            reference=self._reference_parameters(),
        )
        self.policy_version = policy_version

    def _rows(self, segments: Sequence[Segment]) -> list[Row]:
        """Segments with the weight of their tokens, which lag rules and micro-batches do not change."""
        config = self._spec.config
        weights = token_weights(
            [int(segment.loss_mask.sum()) for segment in segments],
            normalisation=config.normalisation,
            groups=[segment.group_id or (segment.trajectory_id, index) for index, segment in enumerate(segments)],
            fixed_num_tokens=config.fixed_num_tokens,
        )
        return [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]

    def _checked_grad_norm(self, report: PassReport, rows: Sequence[Row]) -> float:
        """Scales the gradients down to their limit and gives their norm before that.

        Raises:
            TrainingError: the loss or a gradient is not finite; names the trajectories that make it so.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._spec.config.optimizer.max_grad_norm)
        grad_norm = float(norm)
        if math.isfinite(report.loss) and math.isfinite(grad_norm):
            return grad_norm
        what = "a gradient" if math.isfinite(report.loss) else "the loss"
        raise TrainingError(
            f"step {self.policy_version + 1}: {what} is not finite; the weights are as before. "
            f"Trajectories: {', '.join(self._culprits(rows)) or 'none on its own'}"
        )

    def _culprits(self, rows: Sequence[Row]) -> list[str]:
        """The trajectories whose own loss or gradient is not finite; at most eight, then an ellipsis."""
        named: list[str] = []
        for row in rows:
            self._optimizer.zero_grad(set_to_none=True)
            settings = replace(self._settings, reference=self._reference)
            report = accumulate_gradients(self._model, [row], policy_version=0, settings=settings)
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            if math.isfinite(report.loss) and all(bool(gradient.isfinite().all()) for gradient in gradients):
                continue
            if len(named) == _MAX_NAMED:
                return [*named, "..."]
            named.append(row.segment.trajectory_id)
        return named


def _adamw(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _step_learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of the step that takes policy version `step` to the next."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay_steps is None:
        return config.learning_rate * rise
    progress = max(0.0, (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps))
    return config.learning_rate * rise * max(_FINAL_SHARE, 1.0 - (1.0 - _FINAL_SHARE) * progress)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class _LearnerProcess:
    """The calls that the process answers: `start` first, then those of the learner that it makes."""

    def __init__(self) -> None:
        self._learner: Learner | None = None

    def start(self, spec: LearnerSpec) -> None:
        """Makes the learner."""
        torch.set_num_threads(spec.config.num_threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._learner = Learner(spec)

    def methods(self) -> dict[str, Any]:
        """By name."""
        names = ("train_step", "publish", "save", "load", "warm_up")
        return {"start": self.start} | {name: self._forward(name) for name in names}

    def _forward(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._learner is None:
                raise TrainingError(f"the learner was asked for {name} before start")
            return getattr(self._learner, name)(*args, **kwargs)

        return call


if __name__ == "__main__":
    serve_calls(_LearnerProcess().methods())
