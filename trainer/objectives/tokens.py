"""What objectives read and give, and sums over the sequences of a batch.

Shapes: N tokens, flat, of S sequences (a sequence is a trajectory, in one training row or, where its context was
rewritten, in several); B rows of T places where tokens are padded.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, so that a token that the policy has all but unlearnt, or learnt, gives
finite numbers. At such a ratio every objective that is meant for lag is clipped or capped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """What an objective reads.

    >>> one = torch.zeros(1, 2)
    >>> tokens = TokenBatch.padded(logprobs=one, behaviour_logprobs=one, advantages=one + 1, mask=one == 0)
    >>> tokens.sequences.tolist(), tokens.num_sequences
    ([0, 0], 1)
    """

    logprobs: Tensor
    """[N] lp, with a gradient."""
    behaviour_logprobs: Tensor
    """[N] mu."""
    advantages: Tensor
    """[N] A."""
    mask: Tensor
    """[N] bool: the tokens that are trained. What the others hold is never read, not even a NaN."""
    sequences: Tensor
    """[N] int64: the sequence of each token, 0 to S - 1."""
    groups: Tensor
    """[S] int64: sequences of the same number answer the same prompt."""
    rewards: Tensor
    """[S] the reward of each sequence's episode."""
    lags: Tensor
    """[N] int64: the trainer's policy version minus the token's."""
    proximal_logprobs: Tensor | None = None
    """[N] log-probs under the proximal policy, where several steps are taken on one batch; None: it is sg(lp)."""
    reference_logprobs: Tensor | None = None
    """[N] log-probs under the reference policy; None where nothing asks for them."""
    order: Tensor | None = None
    """[N] int64: the places of all tokens, sequence by sequence, and within one in the order in which they were
    sampled. None: they stand so."""

    @classmethod
    def padded(
        cls,
        *,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        groups: Tensor | None = None,
        rewards: Tensor | None = None,
        lags: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> "TokenBatch":
        """The batch of [B, T] tensors, a sequence a row. Without `groups`, each is a group of its own."""
        num_rows, num_places = logprobs.shape
        rows = torch.arange(num_rows, device=logprobs.device)
        return cls(
            logprobs=logprobs.reshape(-1),
            behaviour_logprobs=behaviour_logprobs.reshape(-1),
            advantages=advantages.expand(num_rows, num_places).reshape(-1),
            mask=mask.reshape(-1),
            sequences=rows.repeat_interleave(num_places),
            groups=rows if groups is None else groups,
            rewards=logprobs.new_zeros(num_rows) if rewards is None else rewards,
            lags=rows.new_zeros(num_rows * num_places) if lags is None else lags.reshape(-1),
            proximal_logprobs=None if proximal_logprobs is None else proximal_logprobs.reshape(-1),
            reference_logprobs=None if reference_logprobs is None else reference_logprobs.reshape(-1),
        )

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.groups)

    def masked(self) -> "TokenBatch":
        """The same with zeros on the tokens that are not trained: their losses and gradients are exactly 0."""
        zero = self.logprobs.new_zeros(())

        def keep(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.where(self.mask, values, zero)

        return replace(
            self,
            logprobs=torch.where(self.mask, self.logprobs, zero),
            behaviour_logprobs=torch.where(self.mask, self.behaviour_logprobs, zero),
            advantages=torch.where(self.mask, self.advantages, zero),
            proximal_logprobs=keep(self.proximal_logprobs),
            reference_logprobs=keep(self.reference_logprobs),
        )

    @property
    def log_ratios(self) -> Tensor:
        """[N] lp - mu, with a gradient, unclamped; 0 outside the mask."""
        return torch.where(self.mask, self.logprobs - self.behaviour_logprobs, self.logprobs.new_zeros(()))

    def sums(self, values: Tensor) -> Tensor:
        """[S] the sum of [N] `values` over each sequence's trained tokens."""
        kept = torch.where(self.mask, values, values.new_zeros(()))
        return kept.new_zeros(self.num_sequences).index_add(0, self.sequences, kept)

    def counts(self) -> Tensor:
        """[S] the number of each sequence's trained tokens, at least 1."""
        return self.sums(torch.ones_like(self.logprobs)).detach().clamp(min=1.0)

    def means(self, values: Tensor) -> Tensor:
        """[S] the mean of [N] `values` over each sequence's trained tokens; 0 where it has none."""
        return self.sums(values) / self.counts()

    def per_token(self, values: Tensor) -> Tensor:
        """[N] for each trained token the value of its sequence, of [S] `values`; 0 outside the mask."""
        return torch.where(self.mask, values[self.sequences], values.new_zeros(()))

    def group_means(self, values: Tensor, *, of_all: bool = False) -> Tensor:
        """[S] for each sequence the mean of [S] `values` over those of its group that have a trained token.

        `of_all`: over all of its group, as baselines are made: they use every reward, masked or not.
        """
        numbers, index = torch.unique(self.groups, return_inverse=True)
        counted = self._counted(of_all=of_all).to(values.dtype)
        totals = values.new_zeros(len(numbers)).index_add(0, index, values * counted)
        counts = values.new_zeros(len(numbers)).index_add(0, index, counted)
        return (totals / counts.clamp(min=1.0))[index]

    def group_log_sums(self, values: Tensor, *, of_all: bool = False) -> Tensor:
        """[S] the logarithm of the sum of exp of [S] `values`, over the same sequences; 0 over none. No gradient."""
        numbers, index = torch.unique(self.groups, return_inverse=True)
        counted = torch.where(self._counted(of_all=of_all), values.detach(), -torch.inf)
        tops = values.new_full((len(numbers),), -torch.inf).scatter_reduce(0, index, counted, "amax")
        tops = torch.where(tops.isfinite(), tops, 0.0)
        totals = values.new_zeros(len(numbers)).index_add(0, index, (counted - tops[index]).exp())
        return (torch.where(totals > 0, totals, 1.0).log() + tops)[index]

    def _counted(self, *, of_all: bool) -> Tensor:
        """[S] bool: the sequences that have a trained token, or all."""
        if of_all:
            return torch.ones_like(self.groups, dtype=torch.bool)
        return self.sums(torch.ones_like(self.logprobs)) > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """What an objective gives, token by token: 0 and False where the mask is false.

    >>> no = torch.tensor([False])
    >>> TokenLosses(losses=torch.zeros(1), clipped=no, left_out=no).left_out.tolist()
    [False]
    """

    losses: Tensor
    """[N] l, with a gradient to lp."""
    clipped: Tensor
    """[N] bool: tokens whose gradient a clip took away, or whose weight was cut to a cap."""
    left_out: Tensor
    """[N] bool: tokens that a mask left out: the objective's own term is 0 there, and they still count in the
    denominator. A pull (`dppo_tv`, `ipo`, a KL term) stands for them too."""


def losses_of(
    tokens: TokenBatch, losses: Tensor, *, clipped: Tensor | None = None, left_out: Tensor | None = None
) -> TokenLosses:
    """`losses` with what is outside of the mask taken away."""
    none = torch.zeros_like(tokens.mask)
    return TokenLosses(
        losses=torch.where(tokens.mask, losses, losses.new_zeros(())),
        clipped=none if clipped is None else clipped & tokens.mask,
        left_out=none if left_out is None else left_out & tokens.mask,
    )


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios clamped to ±MAX_LOG_RATIO."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def by_sign(is_positive: Tensor, positive: float, negative: float, *, like: Tensor) -> Tensor:
    """`positive` or `negative` for each place, in the precision of `like`."""
    return torch.where(is_positive, like.new_tensor(positive), like.new_tensor(negative))
