"""An optimizer step: what its passes gave until it is taken, and the optimizer that takes it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftgym.errors import DriftgymError, NotDoneError
from driftgym.trainer.batch_shape import sampled_lengths
from driftgym.trainer.gradients import PassReport, joined_reports
from driftgym.trainer.learner_config import OptimizerConfig
from driftgym.trainer.training_client import PassFigures, StepReport
from driftgym.types import Segment

_FINAL_SHARE = 0.1  # of the learning rate, where it falls


class OpenStep:
    """The step that passes add to. Their gradients lie in the parameters; here is all else that is known of them."""

    def __init__(self, *, number: int) -> None:
        """Without a pass.

        Args:
            number: the policy version that the step leads to.
        """
        self._number = number
        self._reports: list[PassReport] = []
        self._figures: list[PassFigures] = []
        self._num_segments = 0
        self._num_sampled = 0
        self._num_trained = 0
        self._seconds = 0.0
        self._first_cause: str | None = None
        self.grad_norm: Tensor = torch.tensor(0.0)
        """[] the norm of the gradients that the passes have added up."""

    @property
    def has_passes(self) -> bool:
        """True when there are gradients, or were before they were dropped."""
        return bool(self._reports) or self._first_cause is not None

    def check(self, method: str) -> None:
        """Raises NotDoneError in the place of `method` when the step is spoiled."""
        if self._first_cause is not None:
            raise NotDoneError(
                f"{method} was not done: the gradients of step {self._number} were dropped, and the weights are as "
                f"before, since a forward_backward failed: {self._first_cause}"
            )

    def add(self, report: PassReport, segments: Sequence[Segment], *, grad_norm: Tensor, seconds: float) -> PassFigures:
        """Takes a pass.

        Args:
            report: what it gave.
            segments: what it was given.
            grad_norm: [] of the gradients of all passes so far, this one included.
            seconds: that it took.
        """
        figures = _figures_of(report)
        self._reports.append(report)
        self._figures.append(figures)
        self._num_segments += len(segments)
        self._num_sampled += sum(sampled_lengths(segments))
        self._num_trained += sum(int(segment.train_mask.sum()) for segment in segments)
        self._seconds += seconds
        self.grad_norm = grad_norm
        return figures

    def spoil(self, error: BaseException) -> None:
        """A pass failed: the step will not be taken."""
        text = str(error) if isinstance(error, DriftgymError) else f"{type(error).__name__}: {error}"
        self._first_cause = (text.strip().splitlines() or [type(error).__name__])[0]

    def report(self, *, policy_version: int, learning_rate: float, updates: bool, seconds: float) -> StepReport:
        """The figures of the step, of all its passes.

        Args:
            policy_version: after it.
            learning_rate: of it.
            updates: whether it changed the weights.
            seconds: that the optimizer took.
        """
        figures = self._figures[0] if len(self._figures) == 1 else _figures_of(joined_reports(self._reports))
        metrics = {
            **figures.metrics,
            "grad_norm": float(self.grad_norm),
            "learning_rate": learning_rate,
            "num_segments": float(self._num_segments),
            "num_tokens_trained": float(self._num_trained),
            "num_tokens_masked": float(self._num_sampled - self._num_trained),
            "update_skipped": float(not updates),
            "learner_step_s": self._seconds + seconds,
        }
        return StepReport(
            policy_version=policy_version,
            metrics=metrics,
            num_lag0_tokens=figures.num_lag0_tokens,
            lag0_ratio_sum=figures.lag0_ratio_sum,
        )


def _figures_of(report: PassReport) -> PassFigures:
    lag0_ratios = report.lag0_log_ratios().exp()
    return PassFigures(
        metrics=report.metrics(), num_lag0_tokens=len(lag0_ratios), lag0_ratio_sum=float(lag0_ratios.sum())
    )


def adamw(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """A new optimizer of `parameters`."""
    return torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def step_learning_rate(config: OptimizerConfig, step: int) -> float:
    """The learning rate of the step that takes policy version `step` to the next."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay_steps is None:
        return config.learning_rate * rise
    progress = max(0.0, (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps))
    return config.learning_rate * rise * max(_FINAL_SHARE, 1.0 - (1.0 - _FINAL_SHARE) * progress)


def clipped_step(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    grad_norm: Tensor,
    max_grad_norm: float,
    learning_rate: float,
) -> None:
    """Scales the gradients down to their limit, and moves the parameters by them.

    Args:
        optimizer: of `parameters`.
        parameters: with their gradients.
        grad_norm: [] of these.
        max_grad_norm: their limit.
        learning_rate: of this step.
    """
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_grad_norm, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
