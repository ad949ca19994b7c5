"""The model behind the engine: loading it, a forward pass over slots, and taking new weights from a folder.

Shapes: n rows of a pass, Q new tokens a row, V vocabulary.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from driftgym.agents.generators.embedded.cache import Rows, SlotCache
from driftgym.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightsRefusedError(Exception):
    """The weights in the folder are not those of this model; the model is as it was."""


class ModelRunner:
    """A causal language model, and the KV of its slots."""

    def __init__(self, model: Any, *, num_slots: int, max_context_tokens: int) -> None:
        """Takes a transformers model. Raises ConfigError when its attention is of a kind that slots cannot hold."""
        self._model = model.eval()
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._hidden = torch.finfo(self._dtype).min
        config = model.config.get_text_config()
        check_attention(config, max_context_tokens)
        num_heads = config.num_attention_heads
        self.cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            max_length=max_context_tokens,
            num_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            dtype=self._dtype,
            device=self._device,
        )
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]

    @torch.inference_mode()
    def forward(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], *, rows: Rows, kv_length: int
    ) -> torch.Tensor:
        """[n, V] the logits after each row's last token.

        Args:
            token_ids: [n, Q] new tokens, padded on the left.
            positions: [n, Q] the position of each in its slot; negative for padding.
            rows: the n slots.
            kv_length: above every position.
        """
        ids = torch.from_numpy(token_ids).to(self._device)
        places = torch.from_numpy(positions).to(self._device)
        self.cache.place(rows, places, kv_length)
        seen = torch.arange(kv_length, device=self._device)
        # Finite: a padded query sees nothing, and must not become NaN.
        mask = torch.zeros((), dtype=self._dtype, device=self._device)
        mask = torch.where(seen <= places[:, :, None], mask, self._hidden)[:, None]
        # The cache goes by place: the name of that argument changes within transformers 5.
        output = self._model(ids, mask, places.clamp(min=0), self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def load_weights(self, folder: Path) -> None:
        """Takes the weights of all safetensors files in `folder`, whole or not at all.

        Raises:
            WeightsRefusedError: a file cannot be read, a name is missing or unknown, or a shape is another.
        """
        tensors = _read_tensors(folder)
        own = self._model.state_dict(keep_vars=True)
        _check_names(own, tensors, folder)
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


def load_model(folder: str, *, device: str = "cpu", dtype: str = "float32") -> Any:
    """The causal language model in `folder`, ready for inference. Raises ConfigError with one line."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder}: no model here (no config.json); give a folder that transformers can load")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        )
        return model.to(device).eval()
    except Exception as error:  # whatever transformers raises, the folder or the device is what is wrong
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ConfigError(f"{folder}: the model cannot be loaded: {reason}") from error


def check_attention(config: Any, max_context_tokens: int) -> None:
    """Raises ConfigError unless every layer attends to the whole context, or to a window that holds it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{config.model_type}: the embedded generator has no cache for {', '.join(sorted(unknown))}")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (window is not None and getattr(config, "layer_types", None) is None)
    if slides and window is not None and getattr(config, "use_sliding_window", True) and window < max_context_tokens:
        raise ConfigError(
            f"{config.model_type}: its attention window is {window} tokens; set max_context_tokens to at most that"
        )


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsRefusedError(f"{folder}: no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(os.fspath(file)))
        except Exception as error:  # the library has error types of its own for damaged files
            raise WeightsRefusedError(f"{file}: cannot be read: {error}") from error
    return tensors


def _check_names(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], folder: Path) -> None:
    if unknown := sorted(given.keys() - own.keys()):
        raise WeightsRefusedError(f"{folder}: {len(unknown)} unknown tensors, the first is {unknown[0]}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise WeightsRefusedError(
                f"{folder}: {name} is of shape {tuple(tensor.shape)}, here it is {tuple(own[name].shape)}"
            )
    # A tensor that shares its memory with a given one (tied embeddings) is given too.
    covered = {own[name].data_ptr() for name in given}
    if missing := sorted(name for name, tensor in own.items() if tensor.data_ptr() not in covered):
        raise WeightsRefusedError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
