"""The model behind the engine: loading it, and a forward pass over slots.

Shapes: n rows of a pass, Q new tokens a row, V vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from driftgym.agents.generators.embedded.cache import Rows, SlotCache
from driftgym.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A causal language model, and the KV of its slots."""

    def __init__(self, model: Any, *, num_slots: int, max_context_tokens: int) -> None:
        """Takes a transformers model. Raises ConfigError when its attention is of a kind that slots cannot hold."""
        self.model = model.eval()
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._visible = torch.zeros((), dtype=self._dtype, device=self._device)
        self._hidden = torch.finfo(self._dtype).min
        self._positions = torch.arange(max_context_tokens, device=self._device)
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
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        *,
        rows: Rows,
        kv_length: int,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """[n, num_logits, V] the logits after each row's last tokens.

        Args:
            token_ids: [n, Q] new tokens, padded on the left.
            positions: [n, Q] the position of each in its slot; negative for padding.
            rows: the n slots.
            kv_length: above every position.
            num_logits: after how many tokens of each row, 1 to Q.
        """
        ids = torch.from_numpy(token_ids).to(self._device)
        places = torch.from_numpy(positions).to(self._device)
        self.cache.place(rows, places, kv_length)
        # Finite where hidden: a padded query sees nothing, and must not become NaN.
        mask = torch.where(self._positions[:kv_length] <= places[:, :, None], self._visible, self._hidden)[:, None]
        # The cache goes by place: the name of that argument changes within transformers 5.
        output = self.model(ids, mask, places.clamp(min=0), self.cache, use_cache=True, logits_to_keep=num_logits)
        logits: torch.Tensor = output.logits[:, -num_logits:]
        return logits


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
