"""Rows go through the model in micro-batches: gradients are added up, and what the step's figures need is kept.

Shapes: N trained tokens, flat.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from driftgym.trainer.batching import MicroBatch, Row, TokenScores, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.objectives import LossSpec, TokenBatch, TokenLosses, drift_metrics
from driftgym.trainer.packed_attention import takes_packed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How rows go through the model.

    >>> from driftgym.trainer.objective_config import ObjectiveConfig
    >>> loss = LossSpec(objective=ObjectiveConfig(name="tis"))
    >>> PassSettings(loss=loss, temperature=1.0, max_tokens=4096, device=torch.device("cpu")).max_tokens
    4096
    """

    loss: LossSpec
    """Which loss."""
    temperature: float
    """That tokens were sampled at."""
    max_tokens: int
    """Of one micro-batch, padding included."""
    device: torch.device
    """Where the model is."""
    reference: nn.Module | None = None
    """The reference policy, where the loss reads its log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """What is kept of the N trained tokens of one micro-batch or, joined, of a step. No gradients."""

    losses: Tensor
    """[N] weighted, so that their sum is the loss."""
    logprobs: Tensor
    """[N]."""
    behaviour_logprobs: Tensor
    """[N]."""
    entropies: Tensor
    """[N]."""
    clipped: Tensor
    """[N] bool."""
    left_out: Tensor
    """[N] bool."""
    lags: Tensor
    """[N] int64."""
    exact: Tensor
    """[N] bool."""
    sequences: Tensor
    """[N] int64: the row of each token, counted over all micro-batches."""

    def tokens(self) -> TokenBatch:
        """As measures of drift read them."""
        num_rows = int(self.sequences.max()) + 1 if len(self.sequences) else 0
        rows = torch.arange(num_rows, device=self.sequences.device)
        return TokenBatch(
            logprobs=self.logprobs,
            behaviour_logprobs=self.behaviour_logprobs,
            advantages=torch.zeros_like(self.logprobs),
            mask=torch.ones_like(self.exact),
            sequences=self.sequences,
            groups=rows,
            rewards=self.logprobs.new_zeros(num_rows),
            lags=self.lags,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassReport:
    """What all passes of a step gave, gradients apart."""

    record: TokenRecord | None
    """Of every trained token; None when there is none."""
    num_micro_batches: int
    """Parts that the rows were split into."""
    num_inputs: int
    """Tokens that the model read, padding included."""
    num_padding: int
    """Of these, padding."""

    @property
    def loss(self) -> float:
        """The loss of the whole batch; 0 when nothing is trained."""
        return float(self.record.losses.double().sum()) if self.record is not None else 0.0

    def lag0_log_ratios(self) -> Tensor:
        """[M] lp - mu of the trained tokens of lag 0 whose log-prob can be reproduced, in float64."""
        if self.record is None:
            return torch.zeros(0, dtype=torch.float64)
        chosen = (self.record.lags == 0) & self.record.exact
        return (self.record.logprobs - self.record.behaviour_logprobs)[chosen].double().clamp(-300.0, 300.0)

    def metrics(self) -> dict[str, float]:
        """The figures of the step that come from its tokens; all finite where the loss and the log-probs are."""
        figures = {
            "loss": self.loss,
            "num_micro_batches": float(self.num_micro_batches),
            "padding_fraction": self.num_padding / max(1, self.num_inputs),
        }
        record = self.record
        if record is None:
            return figures | drift_metrics(_nothing()) | dict.fromkeys(_SHARES, 0.0)
        shares = (record.clipped, record.left_out, record.entropies)
        figures |= {name: float(values.double().mean()) for name, values in zip(_SHARES, shares, strict=True)}
        mismatches = self.lag0_log_ratios().abs()
        if len(mismatches):
            figures["mismatch_at_lag0"] = float(mismatches.mean())
        return figures | drift_metrics(record.tokens())


_SHARES = ("clip_fraction", "mask_fraction", "entropy")


def accumulate_gradients(
    model: nn.Module, rows: Sequence[Row], *, policy_version: int, settings: PassSettings
) -> PassReport:
    """Adds the gradient of the loss of `rows` to the parameters of `model`.

    Any split into micro-batches gives the same sums within float error: where a token's loss depends on other rows, the
    micro-batches are one unit. Rows that the loss gives no gradient are scored for the figures, at a third of the cost.
    """
    passes = _Passes(model, policy_version=policy_version, settings=settings)
    if settings.loss.objective.needs_whole_batch:
        untrained = [row for row in rows if not row.num_inputs]
        passes.run_unit(passes.plan(rows), needs_gradient=True, untrained=untrained)
        return passes.report()
    for needs_gradient in (True, False):
        chosen = [row for row in rows if _moves(row, settings.loss) == needs_gradient]
        for part in passes.plan(chosen):
            passes.run_unit([part], needs_gradient=needs_gradient)
    return passes.report()


def _moves(row: Row, loss: LossSpec) -> bool:
    return row.has_gradient or loss.moves_without_advantage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """A micro-batch after its forward pass."""

    rows: Sequence[Row]
    batch: MicroBatch
    scores: TokenScores
    reference_logprobs: Tensor | None


class _Passes:
    """The passes of one step, and what they leave behind."""

    def __init__(self, model: nn.Module, *, policy_version: int, settings: PassSettings) -> None:
        self._model = model
        self._policy_version = policy_version
        self._settings = settings
        self._packs = takes_packed_rows(model)
        self._records: list[TokenRecord] = []
        self._num_rows = 0
        self._num_parts = 0
        self._num_inputs = 0
        self._num_padding = 0

    def plan(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The micro-batches of `rows`."""
        return plan_micro_batches(rows, max_tokens=self._settings.max_tokens, packs=self._packs)

    def run_unit(self, parts: Sequence[Sequence[Row]], *, needs_gradient: bool, untrained: Sequence[Row] = ()) -> None:
        """Micro-batches whose losses are computed together; nothing for none. Baselines count `untrained` rows too.

        One alone goes forward and backward. Of several, all are scored first, without a graph; then each is scored
        again, and its log-probs are multiplied by the gradient that the loss of them all has with respect to them.
        """
        if not parts:
            return
        in_one_pass = needs_gradient and len(parts) == 1
        with torch.set_grad_enabled(in_one_pass):
            scored = [self._score(part) for part in parts]
            tokens = _joined_tokens(scored, untrained)
        if not in_one_pass and needs_gradient:
            tokens = replace(tokens, logprobs=tokens.logprobs.requires_grad_())
        with torch.set_grad_enabled(needs_gradient):
            result = self._settings.loss.losses(tokens)
            weights = torch.cat([each.batch.weights for each in scored])
            losses = result.losses * weights.to(result.losses.dtype)
            if in_one_pass:
                losses.sum().backward()
        self._keep(scored, tokens, losses.detach(), result)
        if needs_gradient and not in_one_pass:
            (slopes,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
            self._push_back(scored, slopes)

    def _push_back(self, scored: Sequence[_Scored], slopes: Tensor) -> None:
        """The second pass of several micro-batches; `slopes` [N] are of all their tokens."""
        parts = slopes.split([len(each.batch.targets) for each in scored])
        for each, part_slopes in zip(scored, parts, strict=True):
            if bool(part_slopes.any()):
                scores = score_tokens(self._model, each.batch, temperature=self._settings.temperature)
                (scores.logprobs * part_slopes).sum().backward()

    def _score(self, rows: Sequence[Row]) -> _Scored:
        settings = self._settings
        batch = micro_batch(rows, policy_version=self._policy_version, device=settings.device, packs=self._packs)
        reference = None
        if settings.reference is not None:
            with torch.no_grad():
                reference = score_tokens(settings.reference, batch, temperature=settings.temperature).logprobs
        scores = score_tokens(self._model, batch, temperature=settings.temperature)
        return _Scored(rows=rows, batch=batch, scores=scores, reference_logprobs=reference)

    def _keep(self, scored: Sequence[_Scored], tokens: TokenBatch, losses: Tensor, result: TokenLosses) -> None:
        self._records.append(
            TokenRecord(
                losses=losses,
                logprobs=tokens.logprobs.detach(),
                behaviour_logprobs=tokens.behaviour_logprobs,
                entropies=torch.cat([each.scores.entropies for each in scored]),
                clipped=result.clipped,
                left_out=result.left_out,
                lags=tokens.lags,
                exact=torch.cat([each.batch.exact for each in scored]),
                sequences=tokens.sequences + self._num_rows,
            )
        )
        self._num_rows += tokens.num_sequences
        self._num_parts += len(scored)
        self._num_inputs += sum(each.batch.num_inputs for each in scored)
        self._num_padding += sum(each.batch.num_padding for each in scored)

    def report(self) -> PassReport:
        """What all units gave."""
        return PassReport(
            record=_joined(self._records),
            num_micro_batches=self._num_parts,
            num_inputs=self._num_inputs,
            num_padding=self._num_padding,
        )


def _joined_tokens(scored: Sequence[_Scored], untrained: Sequence[Row]) -> TokenBatch:
    """What the loss reads of these micro-batches, and of rows without a trained token: their groups and rewards."""
    rows = [row for each in scored for row in each.rows] + list(untrained)
    names = [row.segment.group_id or f"{index} alone" for index, row in enumerate(rows)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    logprobs = torch.cat([each.scores.logprobs for each in scored])
    like = {"dtype": logprobs.dtype, "device": logprobs.device}
    starts = [0, *itertools.accumulate(len(each.rows) for each in scored)]
    references = [each.reference_logprobs for each in scored if each.reference_logprobs is not None]
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=torch.cat([each.batch.behaviour_logprobs for each in scored]).to(logprobs.dtype),
        advantages=torch.cat([each.batch.advantages for each in scored]).to(logprobs.dtype),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        sequences=torch.cat([each.batch.rows + start for each, start in zip(scored, starts, strict=False)]),
        groups=torch.tensor([numbers[name] for name in names], device=logprobs.device),
        rewards=torch.tensor([row.segment.reward for row in rows], **like),  # type: ignore[arg-type]
        lags=torch.cat([each.batch.lags for each in scored]),
        reference_logprobs=torch.cat(references) if references else None,
    )


def _joined(records: Sequence[TokenRecord]) -> TokenRecord | None:
    if not records:
        return None
    names = [field.name for field in fields(TokenRecord)]
    return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


def joined_reports(reports: Sequence[PassReport]) -> PassReport:
    """What several passes gave, as one; no row of one is a row of another."""
    records: list[TokenRecord] = []
    num_rows = 0
    for record in (report.record for report in reports):
        if record is not None and len(record.sequences):
            records.append(replace(record, sequences=record.sequences + num_rows))
            num_rows += int(record.sequences.max()) + 1
    return PassReport(
        record=_joined(records),
        num_micro_batches=sum(report.num_micro_batches for report in reports),
        num_inputs=sum(report.num_inputs for report in reports),
        num_padding=sum(report.num_padding for report in reports),
    )


def _nothing() -> TokenBatch:
    empty = torch.zeros(0, 1)
    return TokenBatch.padded(logprobs=empty, behaviour_logprobs=empty, advantages=empty, mask=empty.bool())
