"""A forward pass without the overhead of transformers' modules, for decoders like those of Llama, Qwen and Mistral.

In a model of half a million parameters the matrix products are a quarter of what transformers' own pass takes; the rest
is Python, and many small operations. The pass here does the same arithmetic in few operations, on the model's own
parameters: what is copied into them counts from the next pass on. The last layer is computed only where logits are
wanted. It holds for layers of attention and a gated feed-forward part with SiLU, each with an RMSNorm before it and a
residual around it, and rotary embeddings that depend on nothing but the position. `lean_decoder` refuses other models;
whoever uses it compares its logits with those of the model.

Shapes: n rows, Q new tokens a row, K of them whose outputs are wanted, E the width, H key/value heads, G query heads
for each of them, D head size, T positions that are read. Tokens of all rows lie together, [n·Q, ...].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from driftgym.agents.generators.embedded.cache import SlotCache

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROTARY_TYPES = ("default", "linear", "llama3")  # others change with the length, or scale more than positions
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_SCORES = 2**14  # of a head: up to here two matrix products are quicker than the fused operation


class LeanRefusedError(Exception):
    """The model is not of the make that the lean pass computes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Queries:
    """The last K tokens of each row, as those that look."""

    num_tokens: int
    mask: Tensor
    """What is added to the scores: [n·H, G·K, T] for `is_small`, else [n, 1, K, T], the same for all heads: of long
    prompts, a copy for each head would be the largest tensor of the pass by far."""
    is_small: bool
    """Whether attention is computed by matrix products of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """Where one forward pass reads and writes; the same for all layers."""

    cache: SlotCache
    rows: slice | Tensor
    lines: Tensor
    """[n·Q·2H], as `SlotCache.lines`."""
    num_rows: int
    kv_length: int
    cos: Tensor
    """[n·Q, 1, D]."""
    sin: Tensor
    """[n·Q, 1, D], negative in the first half."""

    def last(self, states: Tensor, num_tokens: int) -> Tensor:
        """[n·K, ...] of [n·Q, ...]: the last K tokens of each row."""
        if len(states) == self.num_rows * num_tokens:
            return states
        return states.view(self.num_rows, -1, *states.shape[1:])[:, -num_tokens:].flatten(0, 1)


class _Norm:
    """RMSNorm, in float32, as transformers computes it: the weight is applied after the return to the own type."""

    __slots__ = ("_epsilon", "_share", "weight")

    def __init__(self, module: Any) -> None:
        self.weight = module.weight
        self._epsilon = torch.full((1,), module.variance_epsilon, dtype=torch.float32, device=module.weight.device)
        self._share = 1.0 / module.weight.shape[-1]

    def __call__(self, states: Tensor) -> Tensor:
        normed = states * self.scale(states)
        if normed.dtype != states.dtype:
            normed = normed.to(states.dtype)
        return normed.mul_(self.weight)

    def scale(self, states: Tensor) -> Tensor:
        """[..., 1] of [..., size]: what they are multiplied by before the weight, in float32."""
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(self._epsilon, length, length, value=self._share).rsqrt_()


class _Attention:
    """Self-attention over the slots of one layer."""

    __slots__ = (
        "_half",
        "_key",
        "_key_norm",
        "_layer",
        "_num_keys",
        "_num_queries",
        "_output",
        "_query",
        "_query_norm",
        "_scale",
        "_value",
    )

    def __init__(self, module: Any, *, layer: int, num_queries: int, num_keys: int) -> None:
        self._query, self._key = _linear(module.q_proj), _linear(module.k_proj)
        self._value, self._output = _linear(module.v_proj), _linear(module.o_proj)
        self._query_norm = _Norm(module.q_norm) if hasattr(module, "q_norm") else None
        self._key_norm = _Norm(module.k_norm) if hasattr(module, "k_norm") else None
        self._scale: float = module.scaling
        self._half: int = module.head_dim // 2
        self._num_queries, self._num_keys = num_queries, num_keys
        self._layer = layer

    def __call__(self, states: Tensor, run: _Pass, queries: _Queries) -> Tensor:
        """[n·K, E] of [n·Q, E]; keys and values of all Q tokens go to the cache."""
        heads = self._heads(states, run)
        run.cache.write(self._layer, run.lines, heads[:, self._num_queries :])
        asking = run.last(heads, queries.num_tokens)[:, : self._num_queries]
        return functional.linear(self._attended(asking, run, queries), *self._output)

    def _heads(self, states: Tensor, run: _Pass) -> Tensor:
        """[n·Q, G·H + 2H, D]: queries, keys and values, each head of the first two turned by its token's position."""
        parts = [functional.linear(states, *each) for each in (self._query, self._key, self._value)]
        heads = torch.cat(parts, dim=-1).view(len(states), -1, 2 * self._half)
        turned = heads[:, : -self._num_keys]
        if self._query_norm is not None and self._key_norm is not None:
            turned.mul_(self._query_norm.scale(turned))
            turned[:, : self._num_queries].mul_(self._query_norm.weight)
            turned[:, self._num_queries :].mul_(self._key_norm.weight)
        # The halves of a head are the two coordinates.
        crossed = turned.roll(self._half, -1).mul_(run.sin)
        turned.mul_(run.cos).add_(crossed)
        return heads

    def _attended(self, asking: Tensor, run: _Pass, queries: _Queries) -> Tensor:
        """[n·K, G·H·D]."""
        keys, values = run.cache.read(self._layer, run.rows, run.kv_length)
        rows, tokens, size = run.num_rows, queries.num_tokens, 2 * self._half
        if not queries.is_small:
            return self._fused(asking, keys, values, queries)
        # The G heads of one key lie together as G·K queries, so that no key is repeated.
        packed = asking
        if tokens > 1:
            packed = asking.view(rows, tokens, self._num_keys, -1, size).permute(0, 2, 3, 1, 4)
        packed = packed.reshape(rows * self._num_keys, -1, size)
        scores = torch.baddbmm(queries.mask, packed, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        found = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1))
        if tokens > 1:
            found = found.view(rows, self._num_keys, -1, tokens, size).permute(0, 3, 1, 2, 4)
        return found.reshape(rows * tokens, -1)

    def _fused(self, asking: Tensor, keys: Tensor, values: Tensor, queries: _Queries) -> Tensor:
        """[n·K, G·H·D] by the fused operation, which repeats no key either; a single token's heads, packed, are
        several times quicker."""
        is_single = queries.num_tokens == 1
        shape = (len(keys), self._num_keys if is_single else queries.num_tokens, -1, 2 * self._half)
        heads = asking.view(shape) if is_single else asking.view(shape).transpose(1, 2)
        found = functional.scaled_dot_product_attention(
            heads, keys, values, attn_mask=queries.mask, scale=self._scale, enable_gqa=not is_single
        )
        return (found if is_single else found.transpose(1, 2)).reshape(len(asking), -1)


class _Layer:
    """One layer of the decoder."""

    __slots__ = ("_attention", "_attention_norm", "_down", "_feed_norm", "_gate", "_up")

    def __init__(self, module: Any, attention: _Attention) -> None:
        self._attention_norm = _Norm(module.input_layernorm)
        self._attention = attention
        self._feed_norm = _Norm(module.post_attention_layernorm)
        self._gate, self._up = _linear(module.mlp.gate_proj), _linear(module.mlp.up_proj)
        self._down = _linear(module.mlp.down_proj)

    def __call__(self, hidden: Tensor, run: _Pass, queries: _Queries) -> Tensor:
        """[n·K, E] of [n·Q, E]."""
        attended = self._attention(self._attention_norm(hidden), run, queries)
        hidden = attended.add_(run.last(hidden, queries.num_tokens))
        normed = self._feed_norm(hidden)
        gate = functional.silu(functional.linear(normed, *self._gate), inplace=True)
        fed = functional.linear(gate.mul_(functional.linear(normed, *self._up)), *self._down)
        return fed.add_(hidden)


class LeanDecoder:
    """The forward pass of one model over the slots of a cache."""

    def __init__(self, model: Any, *, max_context_tokens: int) -> None:
        """Raises LeanRefusedError for a model of another make; see `lean_decoder`."""
        decoder, config = model.get_decoder(), model.config
        self._num_queries: int = config.num_attention_heads
        self._num_keys: int = config.num_key_value_heads
        self._embedding = model.get_input_embeddings().weight
        self._head = _linear(model.get_output_embeddings())
        self._norm = _Norm(decoder.norm)
        self._layers = [self._layer(module, index) for index, module in enumerate(decoder.layers)]
        self._rotary = _rotary_table(decoder.rotary_emb, self._embedding, max_context_tokens)
        if self._rotary.shape[-1] != decoder.layers[0].self_attn.head_dim:
            raise LeanRefusedError("a part of each head is rotated")
        self._positions = torch.arange(max_context_tokens, device=self._embedding.device)
        self._visible = torch.zeros((), dtype=self._embedding.dtype, device=self._embedding.device)
        self._hidden = torch.finfo(self._embedding.dtype).min

    def _layer(self, module: Any, index: int) -> _Layer:
        attention = _Attention(module.self_attn, layer=index, num_queries=self._num_queries, num_keys=self._num_keys)
        return _Layer(module, attention)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        cache: SlotCache,
        rows: slice | Tensor,
        kv_length: int,
        num_logits: int,
    ) -> Tensor:
        """[n, num_logits, V], for arguments as those of `ModelRunner.forward`; their KV is written to `cache`."""
        num_rows, num_tokens = positions.shape
        flat = positions.flatten()
        rotary = self._rotary[flat if num_tokens == 1 else flat.clamp(min=0)]
        run = _Pass(
            cache=cache,
            rows=rows,
            lines=cache.lines(rows, positions),
            num_rows=num_rows,
            kv_length=kv_length,
            cos=rotary[:, :1],
            sin=rotary[:, 1:],
        )
        last = self._queries(positions, num_tokens=num_logits, kv_length=kv_length)
        every = (
            last if num_logits == num_tokens else self._queries(positions, num_tokens=num_tokens, kv_length=kv_length)
        )
        hidden = functional.embedding(token_ids.flatten(), self._embedding)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, run, every)
        hidden = self._layers[-1](hidden, run, last)
        return functional.linear(self._norm(hidden), *self._head).view(num_rows, num_logits, -1)

    def _queries(self, positions: Tensor, *, num_tokens: int, kv_length: int) -> _Queries:
        is_seen = self._positions[:kv_length] <= positions[:, -num_tokens:, None]
        # Finite where hidden: a padded query sees nothing, and must not become NaN.
        mask = torch.where(is_seen, self._visible, self._hidden)[:, None, None]
        group = self._num_queries // self._num_keys
        is_small = mask.dtype == torch.float32 and group * num_tokens * kv_length <= _SMALL_SCORES
        if is_small:
            mask = mask.expand(len(positions), self._num_keys, group, num_tokens, kv_length)
            mask = mask.reshape(-1, group * num_tokens, kv_length)
        return _Queries(num_tokens=num_tokens, mask=mask if is_small else mask[:, 0], is_small=is_small)


def lean_decoder(model: Any, *, max_context_tokens: int) -> LeanDecoder:
    """The lean pass of a transformers model.

    Raises:
        LeanRefusedError: it is of another kind; or of another make than those of its kind are known to be; or it is
            not on the CPU, where alone the pass was measured.
    """
    config = model.config
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    if config.model_type not in _MODEL_TYPES:
        raise LeanRefusedError(f"a model of kind {config.model_type}")
    if any(each.dtype != dtype or each.device.type != "cpu" for each in parameters) or dtype not in _DTYPES:
        raise LeanRefusedError("its parameters are of several types, or not on the CPU")
    if config.hidden_act != "silu" or _slides(config):
        raise LeanRefusedError(f"its activation is {config.hidden_act}, or its attention slides")
    try:
        if (kind := model.get_decoder().rotary_emb.rope_type) not in _ROTARY_TYPES:
            raise LeanRefusedError(f"its rotary embeddings are of kind {kind}")
        return LeanDecoder(model, max_context_tokens=max_context_tokens)
    except (AttributeError, TypeError) as error:
        raise LeanRefusedError(f"it lacks a part: {error}") from error


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) != {"full_attention"}
    return getattr(config, "sliding_window", None) is not None


def _linear(module: Any) -> tuple[Tensor, Tensor | None]:
    """Its weight and its bias. Raises LeanRefusedError for a layer that is more, as with an adapter on it."""
    if type(module) is not nn.Linear:
        raise LeanRefusedError(f"a {type(module).__name__} in the place of a linear layer")
    return module.weight, module.bias


@torch.no_grad()
def _rotary_table(module: Any, like: Tensor, num_positions: int) -> Tensor:
    """[T, 2, D] the cosines, and the sines, negative in the first half, as the model computes them."""
    positions = torch.arange(num_positions, device=like.device)[None]
    cos, sin = (table[0] for table in module(like, positions))
    half = sin.shape[-1] // 2
    return torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)), dim=1)
