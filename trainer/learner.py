"""The learner: a model, its optimizer, and the steps they take; `learner_process` runs it as a process."""

import copy
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from driftgym.errors import TrainingError
from driftgym.trainer.adapters import adapters_of
from driftgym.trainer.batch_shape import BatchShape, group_names, sampled_lengths, sequence_names
from driftgym.trainer.batching import Row, TokenScorer
from driftgym.trainer.finite import check_finite, checked_grad_norm
from driftgym.trainer.gradients import PassSettings, accumulate_gradients
from driftgym.trainer.learner_config import LearnerConfig, LearnerSpec
from driftgym.trainer.learner_state import has_reference, load_state, save_state
from driftgym.trainer.model_loading import load_model, named_weights, trained_parameters
from driftgym.trainer.models import ordinary_token_ids
from driftgym.trainer.objective_config import ObjectiveConfig
from driftgym.trainer.objectives import LossSpec, token_weights
from driftgym.trainer.ranks import ALONE, Ranks
from driftgym.trainer.sharding import copy_parameters, sharded, whole
from driftgym.trainer.steps import OpenStep, adamw, clipped_step, step_learning_rate
from driftgym.trainer.training_client import PassFigures, StepReport
from driftgym.trainer.warmup import warmup_batches, warmup_learning_rate
from driftgym.trainer.weights import WeightPublisher
from driftgym.types import Segment, WeightUpdate

_DEVICE = torch.device("cpu")


class Learner:
    """A model that is trained. Synchronous; `policy_version` counts its optimizer steps.

    Where several processes train it together (`ranks`), each has a Learner, and is called as the others are.

    Raises:
        ConfigError: the model cannot be loaded, or cannot be trained here.
    """

    def __init__(self, spec: LearnerSpec, *, ranks: Ranks = ALONE) -> None:
        self._spec = spec
        self._ranks = ranks
        self._model = self._new_model()
        self._scorer = sharded(TokenScorer(self._model), ranks)
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
            device=_DEVICE,
            ranks=ranks,
        )
        self._reference: TokenScorer | None = None
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
            check_finite(segments, step=self.policy_version + 1)
            _check_segments(segments, num_known=self._model.get_input_embeddings().weight.shape[0])
            settings = self._pass_settings(objective)
            rows = _rows(segments, batch, config=self._spec.config, loss=settings.loss)
            report = accumulate_gradients(self._scorer, rows, policy_version=self.policy_version, settings=settings)
            norm = checked_grad_norm(
                self._scorer, self.parameters, report, rows, settings=settings, step=self.policy_version + 1
            )
            return self._step.add(report, segments, grad_norm=norm, seconds=time.perf_counter() - started)
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

    def _reference_policy(self, loss: LossSpec) -> TokenScorer | None:
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

    def _new_model(self) -> Any:
        return load_model(self._spec.model, self._spec.model_folder, seed=self._spec.seed, device=_DEVICE)

    def _frozen_copy(self) -> TokenScorer:
        is_alone = self._ranks.size == 1
        model = copy.deepcopy(self._model) if is_alone else self._new_model()  # torch does not copy sharded modules
        scorer = sharded(TokenScorer(model.requires_grad_(False).eval()), self._ranks)
        if not is_alone:
            copy_parameters(self._model, model)
        return scorer

    def _trained_part(self, reference: TokenScorer | None) -> dict[str, torch.nn.Parameter] | None:
        """The parameters of `reference` that training changes in the policy."""
        if reference is None:
            return None
        parameters = dict(reference.model.named_parameters())
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
            report = accumulate_gradients(self._scorer, rows, policy_version=0, settings=settings)
            norm = checked_grad_norm(self._scorer, self.parameters, report, rows, settings=settings, step=step + 1)
            clipped_step(
                optimizer,
                self.parameters,
                grad_norm=norm,
                max_grad_norm=config.max_grad_norm,
                learning_rate=warmup_learning_rate(self._spec.warmup, step),
            )
            optimizer.zero_grad(set_to_none=True)
            losses.append(report.loss)
        return losses

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, by the name that it is published under; see model_loading.named_weights.

        All processes of a learner must go through all of them.
        """
        return ((name, whole(tensor)) for name, tensor in named_weights(self._model))

    def lend_weights(self, *_: Any, **__: Any) -> None:
        """What `publish` is in the processes that only give their parts of the weights, to the first."""
        for _each in self.weights():
            pass

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
            writes=self._ranks.is_first,
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


def _check_segments(segments: Sequence[Segment], *, num_known: int) -> None:
    """Raises TrainingError for what a pass would fail on: there, one of several processes would leave the others."""
    for segment in segments:
        if len(segment.loss_mask) and segment.loss_mask[0]:
            raise TrainingError(f"{segment.trajectory_id}: the first token cannot be trained: nothing predicts it")
        unknown = segment.token_ids[(segment.token_ids < 0) | (segment.token_ids >= num_known)]
        if len(unknown):
            raise TrainingError(
                f"{segment.trajectory_id}: token {unknown[0]} is unknown to the model, which has {num_known} tokens"
            )


def _rows(segments: Sequence[Segment], batch: BatchShape | None, *, config: LearnerConfig, loss: LossSpec) -> list[Row]:
    """Segments with the weight of their tokens, which lag rules, micro-batches and calls do not change.

    Raises:
        TrainingError: they cannot be a part of `batch`; or are a part, and the loss needs all of it at once, or all
            rows of a trajectory of which some are here.
    """
    part = BatchShape.of(segments)
    if batch is not None and not batch.holds(part):
        raise TrainingError("the segments are no part of the batch: its shape is that of all its segments together")
    if batch is not None and batch != part and loss.objective.needs_whole_batch:
        raise TrainingError(f"objective {loss.objective.name} looks at the whole batch: give it in one call")
    if batch is not None and loss.needs_whole_sequences and batch.cuts_a_sequence(part):
        raise TrainingError("the loss looks at whole trajectories: give all segments of a trajectory in one call")
    weights = token_weights(
        sampled_lengths(segments),
        normalisation=config.normalisation,
        groups=group_names(segments),
        sequences=sequence_names(segments),
        fixed_num_tokens=config.fixed_num_tokens,
        batch=batch or part,
    )
    return [Row(segment=s, token_weight=weight) for s, weight in zip(segments, weights, strict=True)]
