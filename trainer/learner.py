"""The learner: a model, its optimizer, and the steps they take. Run as a process, it answers the trainer's calls.

`python -m driftgym.trainer.learner` speaks `driftgym.processes` on its standard input and output; the calls are those
of `training_client.ProcessTrainingClient`, after a first `start`.
"""

import copy
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from driftgym.errors import TrainingError
from driftgym.processes import serve_calls
from driftgym.trainer.adapters import adapters_of
from driftgym.trainer.batch_shape import BatchShape, group_names, sampled_lengths
from driftgym.trainer.batching import Row
from driftgym.trainer.gradients import PassReport, PassSettings, accumulate_gradients
from driftgym.trainer.learner_config import LearnerConfig, LearnerSpec
from driftgym.trainer.learner_state import has_reference, load_state, save_state
from driftgym.trainer.model_loading import load_model, named_weights, trained_parameters
from driftgym.trainer.models import ordinary_token_ids
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.objectives import LossSpec, token_weights
from driftgym.trainer.steps import OpenStep, adamw, clipped_step, step_learning_rate
from driftgym.trainer.training_client import PassFigures, StepReport
from driftgym.trainer.warmup import warmup_batches, warmup_learning_rate
from driftgym.trainer.weights import WeightPublisher
from driftgym.types import Segment, WeightUpdate

_MAX_NAMED = 8


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
        self._optimizer = adamw(self.parameters, spec.config.optimizer)
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
        self._has_moved = False
        self.policy_version = 0
        self._begin_step()

    @property
    def model(self) -> Any:
        """The model of transformers, in whose parameters steps are taken."""
        return self._model

    def train_step(self, segments: Sequence[Segment]) -> StepReport:
        """`forward_backward` on a whole batch, then `optim_step`. Where it fails, the next step begins anew."""
        try:
            self.forward_backward(segments)
        except BaseException:
            self._begin_step()
            raise
        return self.optim_step()

    def forward_backward(
        self,
        segments: Sequence[Segment],
        *,
        objective: ObjectiveConfig | None = None,
        batch: BatchShape | None = None,
    ) -> PassFigures:
        """See TrainingClient."""
        self._step.check("forward_backward")
        started = time.perf_counter()
        try:
            settings = self._pass_settings(objective)
            rows = _rows(segments, batch, config=self._spec.config, loss=settings.loss)
            report = accumulate_gradients(self._model, rows, policy_version=self.policy_version, settings=settings)
            grad_norm = self._checked_grad_norm(report, rows, settings)
            return self._step.add(report, segments, grad_norm=grad_norm, seconds=time.perf_counter() - started)
        except BaseException as error:
            self._begin_step()
            self._step.spoil(error)
            raise

    def optim_step(self) -> StepReport:
        """See TrainingClient. Where the gradient is exactly 0 (nothing is trained, no trained token has an advantage,
        or all of them were left out), weights and optimizer stay as they are."""
        started = time.perf_counter()
        step, config = self._step, self._spec.config.optimizer
        learning_rate = step_learning_rate(config, self.policy_version)
        updates = float(step.grad_norm) > 0.0
        try:
            step.check("optim_step")
            if updates:
                self._has_moved = True
                clipped_step(
                    self._optimizer,
                    self.parameters,
                    grad_norm=step.grad_norm,
                    max_grad_norm=config.max_grad_norm,
                    learning_rate=learning_rate,
                )
            self.policy_version += 1
        finally:
            self._begin_step()
        return step.report(
            policy_version=self.policy_version,
            learning_rate=learning_rate,
            updates=updates,
            seconds=time.perf_counter() - started,
        )

    def _begin_step(self) -> None:
        """Drops the gradients that there are."""
        self._optimizer.zero_grad(set_to_none=True)
        self._step = OpenStep(number=self.policy_version + 1)

    def _pass_settings(self, objective: ObjectiveConfig | None) -> PassSettings:
        """Those of a pass with `objective`, or with the configured one."""
        loss = self._settings.loss if objective is None else replace(self._settings.loss, objective=objective)
        return replace(self._settings, loss=loss, reference=self._reference_policy(loss))

    def _reference_policy(self, loss: LossSpec) -> torch.nn.Module | None:
        """The policy as it was before the first step, where the loss reads it; kept apart, and by checkpoints too."""
        if not loss.needs_reference:
            return None
        if self._reference is None and self._has_moved:
            raise TrainingError(
                f"objective {loss.objective.name} reads the weights from before the first step, which were not kept: "
                "configure it, or use it in the first step already"
            )
        self._reference = self._reference or self._frozen_copy()
        return self._reference

    def _frozen_copy(self) -> torch.nn.Module:
        return copy.deepcopy(self._model).requires_grad_(False).eval()

    def _trained_part(self, reference: torch.nn.Module | None) -> dict[str, torch.nn.Parameter] | None:
        """The parameters of `reference` that training changes in the policy."""
        if reference is None:
            return None
        parameters = dict(reference.named_parameters())
        return {name: parameters[name] for name in self.parameters}

    def warm_up(self, segments: Sequence[Segment]) -> Mapping[str, float]:
        """See ProcessTrainingClient. Uses an optimizer of its own, so that RL starts with a fresh one."""
        if self._step.has_passes:
            raise TrainingError("warm_up was asked for in the middle of a step: take it first, with optim_step")
        started = time.perf_counter()
        ordinary = ordinary_token_ids(self._spec.model_folder, vocab_size=self._model.config.vocab_size)
        batches = warmup_batches(segments, config=self._spec.warmup, ordinary_token_ids=ordinary, seed=self._spec.seed)
        try:
            losses = self._supervised_steps(batches)
        finally:
            self._begin_step()
        tail = losses[-max(1, len(losses) // 10) :]
        return {
            "warmup_loss_first": losses[0] if losses else 0.0,
            "warmup_loss_last": sum(tail) / max(1, len(tail)),
            "warmup_num_steps": float(len(losses)),
            "warmup_s": time.perf_counter() - started,
        }

    def _supervised_steps(self, batches: Iterable[list[Row]]) -> list[float]:
        """The loss before each step."""
        config = self._spec.config.optimizer
        optimizer = adamw(self.parameters, config)
        settings = replace(self._settings, loss=LossSpec(objective=ObjectiveConfig(name="reinforce")))
        losses: list[float] = []
        for step, rows in enumerate(batches):
            report = accumulate_gradients(self._model, rows, policy_version=0, settings=settings)
            clipped_step(
                optimizer,
                self.parameters,
                grad_norm=self._checked_grad_norm(report, rows, settings),
                max_grad_norm=config.max_grad_norm,
                learning_rate=warmup_learning_rate(self._spec.warmup, step),
            )
            optimizer.zero_grad(set_to_none=True)
            losses.append(report.loss)
        return losses

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
        needs_reference = self._settings.loss.needs_reference
        reference = self._reference_policy(self._settings.loss) if needs_reference else self._reference
        save_state(
            folder,
            parameters=self.parameters,
            optimizer=self._optimizer,
            policy_version=self.policy_version,
            reference=self._trained_part(reference),
        )

    def load(self, folder: Path, *, policy_version: int) -> None:
        """See TrainingClient."""
        needs_reference = self._settings.loss.needs_reference or has_reference(folder)
        reference = (self._reference or self._frozen_copy()) if needs_reference else None
        load_state(
            folder,
            parameters=self.parameters,
            optimizer=self._optimizer,
            policy_version=policy_version,
            reference=self._trained_part(reference),
        )
        self._reference = reference
        self._has_moved = True
        self.policy_version = policy_version
        self._begin_step()

    def _checked_grad_norm(self, report: PassReport, rows: Sequence[Row], settings: PassSettings) -> torch.Tensor:
        """[] the norm of the gradients that there are.

        Raises:
            TrainingError: the loss or a gradient is not finite; names the trajectories that make it so.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if math.isfinite(report.loss) and math.isfinite(float(norm)):
            return norm
        what = "a gradient" if math.isfinite(report.loss) else "the loss"
        raise TrainingError(
            f"step {self.policy_version + 1}: {what} is not finite; the weights are as before. "
            f"Trajectories: {', '.join(self._culprits(rows, settings)) or 'none on its own'}"
        )

    def _culprits(self, rows: Sequence[Row], settings: PassSettings) -> list[str]:
        """The trajectories whose own loss or gradient is not finite; at most eight, then an ellipsis."""
        named: list[str] = []
        for row in rows:
            self._optimizer.zero_grad(set_to_none=True)
            report = accumulate_gradients(self._model, [row], policy_version=0, settings=settings)
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            if math.isfinite(report.loss) and all(bool(gradient.isfinite().all()) for gradient in gradients):
                continue
            if len(named) == _MAX_NAMED:
                return [*named, "..."]
            named.append(row.segment.trajectory_id)
        return named


def _rows(segments: Sequence[Segment], batch: BatchShape | None, *, config: LearnerConfig, loss: LossSpec) -> list[Row]:
    """Segments with the weight of their tokens, which lag rules, micro-batches and calls do not change.

    Raises:
        TrainingError: they cannot be a part of `batch`, or are a part and the loss needs all of it at once.
    """
    part = BatchShape.of(segments)
    if batch is not None and not batch.holds(part):
        raise TrainingError("the segments are no part of the batch: its shape is that of all its segments together")
    if batch is not None and batch != part and loss.objective.needs_whole_batch:
        raise TrainingError(f"objective {loss.objective.name} looks at the whole batch: give it in one call")
    weights = token_weights(
        sampled_lengths(segments),
        normalisation=config.normalisation,
        groups=group_names(segments),
        fixed_num_tokens=config.fixed_num_tokens,
        batch=batch or part,
    )
    return [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]


class LearnerProcess:
    """The calls that the process answers: `start` first, then those of the learner that it makes."""

    def __init__(self) -> None:
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner | None:
        """None before `start`."""
        return self._learner

    def start(self, spec: LearnerSpec) -> None:
        """Makes the learner."""
        torch.set_num_threads(spec.config.num_threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._learner = Learner(spec)

    def methods(self) -> dict[str, Any]:
        """By name."""
        names = ("forward_backward", "optim_step", "publish", "save", "load", "warm_up")
        return {"start": self.start} | {name: self._forward(name) for name in names}

    def _forward(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._learner is None:
                raise TrainingError(f"the learner was asked for {name} before start")
            return getattr(self._learner, name)(*args, **kwargs)

        return call


if __name__ == "__main__":
    serve_calls(LearnerProcess().methods())
