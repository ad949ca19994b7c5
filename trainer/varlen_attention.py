"""Attention of rows of unequal lengths in one call: a kernel is told where each row begins, and nothing is padded.

torch's `varlen_attn` is flash-attention; it runs on CUDA, in bfloat16 and float16. `plain_varlen_attn` computes the
same anywhere, row by row: its twin, by which the kernel is tried before it is used, and what is given to it is tested.

Legend: B rows, T tokens of all rows together, h heads, D the width of a head, S queries of a row, K keys of it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LENGTHS = ((5, 5), (1, 6), (3, 3), (4, 9))  # of the queries and the keys of rows on which a kernel is tried
_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 3e-2  # of the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A function like `plain_varlen_attn`, and which tensors it takes.

    >>> PLAIN_KERNEL.takes(device=torch.device("cpu"), dtype=torch.float32)
    True
    """

    name: str
    """Lower-case letters."""
    attend: Callable[..., Any]
    """Its parameters and its result are those of `plain_varlen_attn`."""
    device_type: str
    """As torch calls it."""
    dtypes: tuple[torch.dtype, ...]
    """Those that it computes in."""

    def takes(self, *, device: torch.device, dtype: torch.dtype) -> bool:
        """True for tensors of `dtype` on `device`."""
        return device.type == self.device_type and dtype in self.dtypes


def varlen_kernel(*, device: torch.device, dtype: torch.dtype) -> VarlenKernel | None:
    """The kernel for a model that computes in `dtype` on `device`; None: there is none for it."""
    if device.type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn  # it defines operators: imported where it can be used
    except ImportError:
        return None
    kernel = VarlenKernel(name="varlen", attend=varlen_attn, device_type="cuda", dtypes=(torch.bfloat16, torch.float16))
    return kernel if kernel.takes(device=device, dtype=dtype) else None


def plain_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """[T, h, D]: what `torch.nn.attention.varlen.varlen_attn` gives, whose parameters these are.

    Args:
        query: [T, h, D], one row after the other.
        key, value: [T of the keys, h or fewer, D], likewise.
        cu_seq_q, cu_seq_k: [B + 1] int32: where the queries, and the keys, of each row begin, and where the last ends.
        max_q, max_k: the most queries, and keys, of a row.
        scale: of the products of queries and keys; None: 1 / sqrt(D).
        window_size: how many keys before and after its own place a query sees; -1: all. The last query of a row
            stands at its last key.
        enable_gqa: keys and values may have fewer heads, each for as many heads of the queries.

    Raises:
        ValueError: heads, types or lengths do not go together.
    """
    times = query.shape[1] // key.shape[1]
    if times * key.shape[1] != query.shape[1] or (times > 1 and not enable_gqa):
        raise ValueError(f"varlen attention: {query.shape[1]} heads of queries and {key.shape[1]} of keys")
    if cu_seq_q.dtype != torch.int32 or cu_seq_k.dtype != torch.int32:
        raise ValueError(f"varlen attention: bounds must be int32, not {cu_seq_q.dtype} and {cu_seq_k.dtype}")
    bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    longest = (_longest(bounds_q), _longest(bounds_k))
    if (bounds_q[-1], bounds_k[-1], *longest) != (len(query), len(key), max_q, max_k):
        raise ValueError(f"varlen attention: bounds {bounds_q} and {bounds_k} are not those of the rows")
    scale = query.shape[2] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)  # of what is within, as in the kernel
    queries = query.to(dtype) * scale
    keys, values = (each.to(dtype).repeat_interleave(times, dim=1) for each in (key, value))
    rows = zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True)
    parts = [
        _row_attention(queries[slice(*of_q)], keys[slice(*of_k)], values[slice(*of_k)], window_size)
        for of_q, of_k in rows
    ]
    return torch.cat(parts).to(query.dtype)


PLAIN_KERNEL = VarlenKernel(
    name="plain",
    attend=plain_varlen_attn,
    device_type="cpu",
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
)
"""The twin as a kernel. Nothing chooses it: blocks of rows are faster where there is no better one."""


def is_right(
    kernel: VarlenKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_key_heads: int,
    head_dim: int,
    window: int | None = None,
) -> bool:
    """Whether `kernel` gives on an example what its twin does, and the same gradients. Raises what `kernel` does."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = (sum(lengths) for lengths in zip(*_LENGTHS, strict=True))
    shapes = ((num_queries, num_heads), (num_keys, num_key_heads), (num_keys, num_key_heads), (num_queries, num_heads))
    given = [torch.randn((*shape, head_dim), generator=generator).to(device, dtype) for shape in shapes]
    found, expected = (_with_gradients(each, given, window=window) for each in (kernel.attend, plain_varlen_attn))
    tolerance = _TOLERANCE if torch.finfo(dtype).bits >= torch.finfo(torch.float32).bits else _LOW_PRECISION_TOLERANCE
    return all(
        bool((one.double() - other.double()).abs().max() <= tolerance * other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def causal_window(window: int | None) -> tuple[int, int]:
    """The `window_size` of queries that see at most `window` keys up to their own, or all of these."""
    return (-1 if window is None else window - 1, 0)


def _with_gradients(attend: Callable[..., Any], given: list[Tensor], *, window: int | None) -> list[Tensor]:
    """What it gives for the queries, keys and values `given`, and their gradients for the slopes given last."""
    *leaves, slopes = (tensor.clone().requires_grad_() for tensor in given)
    bounds = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=slopes.device)
        for lengths in zip(*_LENGTHS, strict=True)
    ]
    longest = [max(lengths) for lengths in zip(*_LENGTHS, strict=True)]
    with torch.enable_grad():
        out = attend(*leaves, *bounds, *longest, window_size=causal_window(window), enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, slopes.detach())]


def _row_attention(query: Tensor, key: Tensor, value: Tensor, window_size: tuple[int, int]) -> Tensor:
    """[S, h, D] of scaled queries [S, h, D], keys and values [K, h, D]."""
    before, after = window_size
    num_keys = len(key)
    key_places = torch.arange(num_keys, device=key.device)
    distances_SK = key_places - key_places[num_keys - len(query) :, None]
    hidden = ((distances_SK > after) & (after >= 0)) | ((-distances_SK > before) & (before >= 0))
    scores_hSK = torch.einsum("shd,khd->hsk", query, key).masked_fill(hidden, float("-inf"))
    return torch.einsum("hsk,khd->shd", scores_hSK.softmax(dim=-1), value)


def _longest(bounds: list[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(bounds))
