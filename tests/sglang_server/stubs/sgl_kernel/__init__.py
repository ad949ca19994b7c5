"""Stands in for SGLang's kernels, which exist for CUDA alone, where a server runs on torch's own attention.

One function is used there; every other name can be imported, and raises when it is called.
"""

import sys
import types
from typing import Any

import torch

__version__ = "0.0.0+cpu"
torch.library.Library("sgl_kernel", "FRAGMENT")  # torch.ops.sgl_kernel has to exist


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes the new tokens' places in the KV cache, which lie one after the other, into each request's row."""
    del pool_len
    first = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[first : first + count].to(req_to_token.dtype)
        first += count


def _missing(name: str) -> Any:
    def kernel(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} exists for CUDA alone")

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


class _Part(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"{__name__}.{name}")


for _name in ("allreduce", "elementwise", "flash_attn", "kvcacheio", "mamba", "quantization", "speculative", "utils"):
    sys.modules[f"{__name__}.{_name}"] = _Part(f"{__name__}.{_name}")
