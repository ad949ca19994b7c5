"""Rows go through the model in micro-batches: gradients are added up, and what the step's figures need is kept.

Shapes: N trained tokens, flat.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.objectives import LossSpec, TokenBatch, TokenLosses, drift_metrics
from driftgym.trainer.packed_attention import takes_packed_rows
from driftgym.trainer.ranks import ALONE, Ranks
from driftgym.trainer.scored_rows import ScoredRows, joined_tokens, lasting_numbers, sequence_name


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
    ranks: Ranks = ALONE
    """The processes that share the rows, each with all of `rows` and this model."""


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
    """[N] int64: the sequence of each token, by a number that is the same in every micro-batch, call and process."""

    def tokens(self) -> TokenBatch:
        """As measures of drift read them."""
        numbers, sequences = torch.unique(self.sequences, return_inverse=True)
        return TokenBatch(
            logprobs=self.logprobs,
            behaviour_logprobs=self.behaviour_logprobs,
            advantages=torch.zeros_like(self.logprobs),
            mask=torch.ones_like(self.exact),
            sequences=sequences,
            groups=torch.arange(len(numbers), device=numbers.device),
            rewards=self.logprobs.new_zeros(len(numbers)),
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
    micro-batches that hold them are one unit. Rows that the loss gives no gradient are scored for the figures, at a
    third of the cost. Several processes do the same, each with its share of the rows; each gets the report of them all,
    and gradients are added up by how the model is sharded.
    """
    passes = _Passes(model, policy_version=policy_version, settings=settings)
    loss, own = settings.loss, settings.ranks.share(rows)
    if loss.objective.needs_whole_batch:
        untrained = [row for row in rows if not row.num_inputs]
        for unit in passes.in_step([passes.plan(own)], needs_gradient=True):
            passes.run_unit(unit, needs_gradient=True, untrained=untrained, of_all_ranks=True)
        return passes.report()
    moving = _moving(own, loss)
    for needs_gradient in (True, False):
        chosen = [row for row, moves in zip(own, moving, strict=True) if moves == needs_gradient]
        units = _units(passes.plan(chosen), keeps_sequences=loss.needs_whole_sequences)
        for unit in passes.in_step(units, needs_gradient=needs_gradient):
            passes.run_unit(unit, needs_gradient=needs_gradient)
    return passes.report()


def _moving(rows: Sequence[Row], loss: LossSpec) -> list[bool]:
    """Whether the loss may give each row a gradient; also one without an advantage, whose ratios weigh other rows."""
    moving = [row.has_gradient or loss.moves_without_advantage for row in rows]
    if not loss.needs_whole_sequences:
        return moving
    names = {sequence_name(row) for row, moves in zip(rows, moving, strict=True) if moves}
    return [sequence_name(row) in names for row in rows]


def _units(parts: Sequence[Sequence[Row]], *, keeps_sequences: bool) -> list[list[Sequence[Row]]]:
    """Micro-batches whose losses are computed together: each on its own, or all that hold rows of one sequence."""
    units: list[tuple[set[Hashable], list[Sequence[Row]]]] = []
    for part in parts:
        names, members = ({sequence_name(row) for row in part} if keeps_sequences else set()), [part]
        joined = [unit for unit in units if not names.isdisjoint(unit[0])]
        units = [unit for unit in units if unit not in joined]
        for earlier_names, earlier in joined:
            names, members = names | earlier_names, earlier + members
        units.append((names, members))
    return [members for _, members in units]


class _Passes:
    """The passes of one step, and what they leave behind."""

    def __init__(self, model: nn.Module, *, policy_version: int, settings: PassSettings) -> None:
        self._model = model
        self._policy_version = policy_version
        self._settings = settings
        self._packs = takes_packed_rows(model)
        self._records: list[TokenRecord] = []
        self._num_parts = 0
        self._num_inputs = 0
        self._num_padding = 0

    def plan(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The micro-batches of `rows`."""
        return plan_micro_batches(rows, max_tokens=self._settings.max_tokens, packs=self._packs)

    def in_step(self, units: Sequence[Sequence[Sequence[Row]]], *, needs_gradient: bool) -> list[list[Sequence[Row]]]:
        """`units`, and micro-batches without rows, so that each process makes the same passes: in each they meet."""
        ranks = self._settings.ranks
        same = [list(unit) for unit in units]
        if ranks.size == 1:
            return same
        parts = [part for unit in same for part in unit]
        more: list[Sequence[Row]] = [[] for _ in range(ranks.largest(len(parts)) - len(parts))]
        if needs_gradient and ranks.largest(max(map(len, same), default=0)) > 1:
            return [parts + more]  # scored first, as some of them have to be
        return same + [[each] for each in more]

    def run_unit(
        self,
        parts: Sequence[Sequence[Row]],
        *,
        needs_gradient: bool,
        untrained: Sequence[Row] = (),
        of_all_ranks: bool = False,
    ) -> None:
        """Micro-batches whose losses are computed together; nothing for none. Baselines count `untrained` rows too.

        One alone goes forward and backward. Of several, all are scored first, without a graph; then each is scored
        again, and its log-probs are multiplied by the gradient that the loss of them all has with respect to them.
        With `of_all_ranks`, the loss is that of the micro-batches of all processes.
        """
        if not parts:
            return
        ranks = self._settings.ranks
        joins_ranks = of_all_ranks and ranks.size > 1
        in_one_pass = needs_gradient and len(parts) == 1 and not joins_ranks
        with torch.set_grad_enabled(in_one_pass):
            own = [self._score(part) for part in parts]
        scored = self._gathered(own) if joins_ranks else own
        if any(each.rows for each in scored):
            slopes = self._lose(
                scored,
                untrained,
                needs_gradient=needs_gradient,
                in_one_pass=in_one_pass,
                keeps=ranks.is_first or not joins_ranks,  # what all have, all would count
            )
        else:
            slopes = self._lose_nothing(scored, in_one_pass=in_one_pass)
        if needs_gradient and not in_one_pass:
            first = ranks.rank * len(own) if joins_ranks else 0
            self._push_back(own, slopes[first : first + len(own)])

    def _gathered(self, scored: Sequence[ScoredRows]) -> list[ScoredRows]:
        """The micro-batches of all processes, as many of each, by rank."""
        plain = [replace(each, batch=replace(each.batch, packed_rows=None)) for each in scored]
        return [each for of_rank in self._settings.ranks.gather(plain) for each in of_rank]

    def _lose_nothing(self, scored: Sequence[ScoredRows], *, in_one_pass: bool) -> list[Tensor]:
        """`_lose` for micro-batches without rows: a gradient of 0, for the sake of the other processes."""
        if in_one_pass:
            scored[0].scores.logprobs.sum().backward()
        return [each.scores.logprobs.detach() for each in scored]

    def _lose(
        self,
        scored: Sequence[ScoredRows],
        untrained: Sequence[Row],
        *,
        needs_gradient: bool,
        in_one_pass: bool,
        keeps: bool,
    ) -> list[Tensor]:
        """The loss, and its backward pass or else, of each micro-batch, [N] its slopes; `keeps` it for the figures."""
        with torch.set_grad_enabled(in_one_pass):
            tokens = joined_tokens(scored, untrained)
        if not in_one_pass and needs_gradient:
            tokens = replace(tokens, logprobs=tokens.logprobs.requires_grad_())
        with torch.set_grad_enabled(needs_gradient):
            result = self._settings.loss.losses(tokens)
            weights = torch.cat([each.batch.weights for each in scored])
            losses = result.losses * weights.to(result.losses.dtype)
            if in_one_pass:
                losses.sum().backward()
        if keeps:
            self._keep(scored, tokens, losses.detach(), result)
        if in_one_pass or not needs_gradient:
            return []
        (slopes,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
        return list(slopes.split([len(each.batch.targets) for each in scored]))

    def _push_back(self, scored: Sequence[ScoredRows], slopes: Sequence[Tensor]) -> None:
        """The second pass of several micro-batches; `slopes` [N] are of the tokens of each."""
        may_skip = self._settings.ranks.size == 1
        for each, part_slopes in zip(scored, slopes, strict=True):
            if not may_skip or bool(part_slopes.any()):
                scores = score_tokens(self._model, each.batch, temperature=self._settings.temperature)
                (scores.logprobs * part_slopes).sum().backward()

    def _score(self, rows: Sequence[Row]) -> ScoredRows:
        settings = self._settings
        batch = micro_batch(rows, policy_version=self._policy_version, device=settings.device, packs=self._packs)
        reference = None
        if settings.reference is not None:
            with torch.no_grad():
                reference = score_tokens(settings.reference, batch, temperature=settings.temperature).logprobs
        scores = score_tokens(self._model, batch, temperature=settings.temperature)
        return ScoredRows(rows=rows, batch=batch, scores=scores, reference_logprobs=reference)

    def _keep(self, scored: Sequence[ScoredRows], tokens: TokenBatch, losses: Tensor, result: TokenLosses) -> None:
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
                sequences=lasting_numbers(scored),
            )
        )
        read = [each.batch for each in scored if each.rows]
        self._num_parts += len(read)
        self._num_inputs += sum(batch.num_inputs for batch in read)
        self._num_padding += sum(batch.num_padding for batch in read)

    def report(self) -> PassReport:
        """What all units gave, in all processes."""
        own = PassReport(
            record=_joined(self._records),
            num_micro_batches=self._num_parts,
            num_inputs=self._num_inputs,
            num_padding=self._num_padding,
        )
        return joined_reports(self._settings.ranks.gather(own))


def _joined(records: Sequence[TokenRecord]) -> TokenRecord | None:
    if not records:
        return None
    names = [field.name for field in fields(TokenRecord)]
    return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


def joined_reports(reports: Sequence[PassReport]) -> PassReport:
    """What several passes gave, as one."""
    return PassReport(
        record=_joined([report.record for report in reports if report.record is not None]),
        num_micro_batches=sum(report.num_micro_batches for report in reports),
        num_inputs=sum(report.num_inputs for report in reports),
        num_padding=sum(report.num_padding for report in reports),
    )


def _nothing() -> TokenBatch:
    empty = torch.zeros(0, 1)
    return TokenBatch.padded(logprobs=empty, behaviour_logprobs=empty, advantages=empty, mask=empty.bool())
