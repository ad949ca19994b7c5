"""Attention over a packed sequence, for decoders of transformers that take an attention function by its name.

Queries, keys and values are computed on the packed sequence [1, T]; the attention function gathers them into blocks of
rows (see `packing`), attends within each row, and puts what its tokens own back in its place. Gradients of a token that
rows share add up in the gathering. `enable_packed_rows` tries it on the model at hand; a model that it does not hold
for reads padded rows. Where there is a kernel for rows of unequal lengths (see `varlen_attention`), one call takes the
place of the blocks: its queries are the packed sequence as it is, its keys those of whole rows.

Legend: b rows of a block, S queries of each, K keys, h heads, D the width of a head, T tokens, B rows, W the longest.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from driftgym.trainer.packing import BlockPlan, Int64Array, PackingPlan, plan_packing
from driftgym.trainer.precision import body_dtype, decoder_output
from driftgym.trainer.varlen_attention import VarlenKernel, causal_window, is_right
from driftgym.types import Int32Array

_NAME = "driftgym_packed"
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 5e-2
_BUILT_OTHERWISE = (AttributeError, TypeError, ValueError, RuntimeError)
_TRIED_WINDOW = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBlock:
    """Rows whose attention is computed together. Made by `packed_rows`."""

    queries: Tensor
    """[b, S] int64 places in the packed sequence; 0 after the end of a row."""
    keys: Tensor
    """[b, K] int64 places in the packed sequence; 0 after the end of a row."""
    owned: Tensor
    """[T of the block] int64 places in the flat [b·S] of the tokens that the rows own."""
    first_queries: Tensor
    """[b], or [1] where all are the same, int64: the position of the first query of each row."""
    allowed: Tensor | None
    """[b or 1, 1, S, K] bool: which keys a query attends to. None: causal, without a mask."""

    def allowed_within(self, window: int | None) -> Tensor | None:
        """`allowed`, for attention that goes back at most `window` tokens, the query's own included."""
        if window is None or self.keys.shape[1] <= window:
            return self.allowed
        return _allowed(
            self.first_queries, num_queries=self.queries.shape[1], num_keys=self.keys.shape[1], window=window
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBounds:
    """Where rows begin and end, for a kernel that is told. Rows that own a token, in the order of the blocks."""

    query_bounds: Tensor
    """[b + 1] int32: where in the packed sequence the tokens of each row begin, and where the last ends."""
    key_bounds: Tensor
    """[b + 1] int32: the same of `keys`."""
    keys: Tensor | None
    """[K] int64: the places in the packed sequence of the tokens of whole rows. None: it is those, in this order."""
    max_queries: int
    """The most tokens that a row owns."""
    max_keys: int
    """The length of the longest row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """What a model reads of packed rows, its token ids apart. Made by `packed_rows`."""

    position_ids: Tensor
    """[1, T] int64: the position of each token in its row."""
    paths: Tensor
    """[B, W] int64: the place of each token of a row; 0 after its end."""
    blocks: tuple[AttentionBlock, ...]
    """In the order of the packed sequence."""
    bounds: RowBounds
    """The same rows, for a kernel."""

    def decoder_arguments(self) -> dict[str, Any]:
        """What a decoder with `enable_packed_rows` is called with, beside the token ids.

        The mask is of a shape that no attention but the packed one can use.
        """
        unusable = torch.ones((1, 1, 0, 0), dtype=torch.bool, device=self.position_ids.device)
        return {"position_ids": self.position_ids, "attention_mask": unusable, "packed_rows": self}


def packed_rows(plan: PackingPlan, *, device: torch.device) -> PackedRows:
    """The tensors of `plan`."""
    positions = np.zeros(plan.num_tokens, dtype=np.int64)
    for path, length in zip(plan.paths, plan.lengths, strict=True):
        positions[path[:length]] = np.arange(length)
    return PackedRows(
        position_ids=torch.from_numpy(positions)[None].to(device),
        paths=torch.from_numpy(plan.paths).to(device),
        blocks=tuple(_attention_block(plan, block, device) for block in plan.blocks),
        bounds=_row_bounds(plan, device),
    )


def packed_token_ids(plan: PackingPlan, sequences: Sequence[Int32Array], *, device: torch.device) -> Tensor:
    """[1, T] int64: the token ids of `sequences`, which `plan` lays out."""
    token_ids = np.zeros(plan.num_tokens, dtype=np.int64)
    for path, length, sequence in zip(plan.paths, plan.lengths, sequences, strict=True):
        token_ids[path[:length]] = sequence
    return torch.from_numpy(token_ids)[None].to(device)


def takes_packed_rows(model: nn.Module) -> bool:
    """True where `enable_packed_rows` was called on `model` and holds."""
    return _implementation(model).startswith(_NAME)


def attention_in_words(model: nn.Module) -> str:
    """How the rows of a micro-batch are attended to, for people to read."""
    if not takes_packed_rows(model):
        return "of padded rows"
    kernel = _implementation(model).removeprefix(_NAME).removeprefix("_")
    return f"of packed rows by the kernel {kernel}" if kernel else "of packed rows in blocks"


def _implementation(model: nn.Module) -> str:
    config = getattr(model.get_decoder(), "config", None)  # type: ignore[operator]
    return getattr(config, "_attn_implementation", None) or ""


@torch.no_grad()
def enable_packed_rows(model: nn.Module) -> bool:
    """Lets the decoder of `model` read packed rows, where that changes no figure. True when it does.

    Calls without packed rows are computed as before.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    config = decoder.config
    if config._attn_implementation != "sdpa" or not _tells_attention_everything(decoder):
        return False
    transformers.AttentionInterface.register(_NAME, _packed_attention)
    transformers.AttentionMaskInterface.register(_NAME, sdpa_mask)
    config._attn_implementation = _NAME
    try:
        if _is_right_on_an_example(decoder):
            return True
    except _BUILT_OTHERWISE:
        pass
    config._attn_implementation = "sdpa"
    return False


@torch.no_grad()
def attend_by_kernel(model: nn.Module, kernel: VarlenKernel) -> bool:
    """Has a model that takes packed rows attend by `kernel` to them, where that changes no figure. True if it does."""
    if not takes_packed_rows(model):
        return False
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    config = decoder.config
    name = f"{_NAME}_{kernel.name}"
    transformers.AttentionInterface.register(name, functools.partial(_packed_attention, kernel=kernel))
    transformers.AttentionMaskInterface.register(name, sdpa_mask)
    config._attn_implementation = name
    try:
        if _is_right_for(model, kernel) and _is_right_on_an_example(decoder):
            return True
    except _BUILT_OTHERWISE:
        pass
    config._attn_implementation = _NAME
    return False


def _is_right_for(model: nn.Module, kernel: VarlenKernel) -> bool:
    """Tries `kernel` on heads like those of `model`."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    config = decoder.config
    num_heads = config.num_attention_heads
    tried = functools.partial(
        is_right,
        kernel,
        device=next(decoder.parameters()).device,
        dtype=body_dtype(model),
        num_heads=num_heads,
        num_key_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )
    slides = getattr(config, "sliding_window", None) is not None
    return tried(window=None) and (not slides or tried(window=_TRIED_WINDOW))


def _tells_attention_everything(decoder: Any) -> bool:
    """True for decoders whose attention function learns of all that restricts attention: flash kernels need that."""
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    supports = ("_supports_flash_attn", "_supports_attention_backend")
    return kinds <= _KINDS_OF_LAYERS and all(getattr(decoder, name, False) for name in supports)


def _is_right_on_an_example(decoder: Any) -> bool:
    """Compares rows that share beginnings, packed, with each row alone."""
    rows = [[0, 1, 2, 3, 0, 2], [0, 1, 2, 0, 3], [2, 1, 3], [0, 1, 3, 1]]
    sequences = [np.array(row, dtype=np.int32) for row in rows]
    device = next(decoder.parameters()).device
    plan = plan_packing(sequences)
    packing = packed_rows(plan, device=device)
    token_ids = packed_token_ids(plan, sequences, device=device)
    packed = decoder_output(decoder, token_ids, **packing.decoder_arguments())[0]
    for path, row in zip(plan.paths, rows, strict=True):
        alone = decoder_output(decoder, torch.tensor([row], device=device))[0]
        is_low = torch.finfo(alone.dtype).bits < torch.finfo(torch.float32).bits
        tolerance = (_LOW_PRECISION_TOLERANCE if is_low else _TOLERANCE) * float(alone.abs().max())
        if float((packed[path[: len(row)]] - alone).abs().max()) > tolerance:
            return False
    return True


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    sliding_window: int | None = None,
    kernel: VarlenKernel | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, T, h, D]: attention within rows. Queries are [1, h, T, D]; keys and values may have fewer heads.

    Raises:
        ValueError: the layer asks for a form of attention that is not computed here.
    """
    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True):
        raise ValueError(f"packed rows: attention with {', '.join(unknown) or 'is_causal=False'} is not computed")
    query_ThD, key_ThD, value_ThD = (each[0].transpose(0, 1) for each in (query, key, value))
    scaling, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
    if kernel is not None and not dropout and kernel.takes(device=query.device, dtype=query.dtype):
        attended_ThD = _attended_by(
            kernel, query_ThD, key_ThD, value_ThD, bounds=packed_rows.bounds, window=sliding_window, scaling=scaling
        )
        return attended_ThD[None], None
    parts = []
    for block in packed_rows.blocks:
        out_bShD = _attended(
            _gathered(query_ThD, block.queries),
            _gathered(key_ThD, block.keys),
            _gathered(value_ThD, block.keys),
            allowed=block.allowed_within(sliding_window),
            scaling=scaling,
            dropout=dropout,
        )
        parts.append(out_bShD.flatten(0, 1).index_select(0, block.owned))
    return torch.cat(parts)[None], None


def _attended_by(
    kernel: VarlenKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: RowBounds,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """[T, h, D]: what `kernel` gives for queries [T, h, D], keys and values [T, h or fewer, D]."""
    if bounds.keys is not None:
        key, value = key.index_select(0, bounds.keys), value.index_select(0, bounds.keys)
    return kernel.attend(
        query,
        key,
        value,
        bounds.query_bounds,
        bounds.key_bounds,
        bounds.max_queries,
        bounds.max_keys,
        scale=scaling,
        window_size=causal_window(window),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _gathered(states: Tensor, places: Tensor) -> Tensor:
    """[b, h, n, D] the states [T, h, D] at [b, n] `places`."""
    return states.index_select(0, places.flatten()).unflatten(0, tuple(places.shape)).transpose(1, 2)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor | None, scaling: float | None, dropout: float
) -> Tensor:
    """[b, S, h, D]: torch's attention of queries [b, h, S, D] over keys and values [b, h or fewer, K, D]."""
    times = query.shape[1] // key.shape[1]
    shares_heads = times > 1 and (allowed is None or query.device.type == "cpu")
    if times > 1 and not shares_heads:  # with a mask, the fast kernels of a GPU want as many of these as queries
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        scale=scaling,
        is_causal=allowed is None,
        enable_gqa=shares_heads,
    ).transpose(1, 2)


def _row_bounds(plan: PackingPlan, device: torch.device) -> RowBounds:
    rows = [row for block in plan.blocks for row in block.rows]
    num_keys = plan.lengths[rows]
    num_queries = num_keys - plan.num_shared[rows]
    keys = None
    if plan.num_shared.any():
        paths = plan.paths[rows]
        keys = torch.from_numpy(paths[np.arange(paths.shape[1]) < num_keys[:, None]]).to(device)
    return RowBounds(
        query_bounds=_bounds_of(num_queries, device),
        key_bounds=_bounds_of(num_keys, device),
        keys=keys,
        max_queries=int(num_queries.max()),
        max_keys=int(num_keys.max()),
    )


def _bounds_of(lengths: Int64Array, device: torch.device) -> Tensor:
    """[b + 1] int32: 0 and the running sums of [b] `lengths`."""
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)).to(device)


def _attention_block(plan: PackingPlan, block: BlockPlan, device: torch.device) -> AttentionBlock:
    rows = list(block.rows)
    keys = plan.paths[rows, : block.num_keys]
    places = np.array(block.first_queries)[:, None] + np.arange(block.num_queries)
    queries = np.take_along_axis(keys, np.minimum(places, block.num_keys - 1), axis=1)
    queries[places >= plan.lengths[rows][:, None]] = 0
    firsts = block.first_queries if len(set(block.first_queries)) > 1 else block.first_queries[:1]
    first_queries = torch.tensor(firsts, device=device)
    allowed = None
    if not block.is_causal:
        allowed = _allowed(first_queries, num_queries=block.num_queries, num_keys=block.num_keys)
    return AttentionBlock(
        queries=torch.from_numpy(queries).to(device),
        keys=torch.from_numpy(keys).to(device),
        owned=torch.from_numpy(plan.owned(block)).to(device),
        first_queries=first_queries,
        allowed=allowed,
    )


def _allowed(first_queries: Tensor, *, num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    """[b, 1, S, K] bool: the keys up to each query, at most `window` of them.

    A query after the end of its row sees something too: a softmax over nothing would spoil all gradients.
    """
    device = first_queries.device
    query_positions = first_queries[:, None, None, None] + torch.arange(num_queries, device=device)[:, None]
    query_positions = query_positions.clamp(max=num_keys - 1)
    key_positions = torch.arange(num_keys, device=device)
    allowed = key_positions <= query_positions
    return allowed if window is None else allowed & (key_positions > query_positions - window)
