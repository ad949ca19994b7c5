"""The model behind the engine: loading it, and a forward pass over slots.

Shapes: n rows of a pass, Q new tokens a row, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from driftgym.agents.generators.embedded.cache import Rows, SlotCache
from driftgym.agents.generators.embedded.lean import LeanDecoder, LeanRefusedError, lean_decoder
from driftgym.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How far the logits of two ways to compute them may lie apart, in units of the largest one, or of 1 where all are less.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_TRIAL_TOKENS = 9


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
        self._lean = self._tried(max_context_tokens, num_rows=min(2, num_slots))

    @property
    def is_lean(self) -> bool:
        """True when the forward pass is the lean one, False when it is that of transformers."""
        return self._lean is not None

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
        compute = self._plain if self._lean is None else self._lean.forward
        return compute(
            ids, places, cache=self.cache, rows=self.cache.index(rows), kv_length=kv_length, num_logits=num_logits
        )

    def _plain(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        *,
        cache: SlotCache,
        rows: slice | torch.Tensor,
        kv_length: int,
        num_logits: int,
    ) -> torch.Tensor:
        """The forward pass of transformers."""
        cache.place(rows, places, kv_length)
        # Finite where hidden: a padded query sees nothing, and must not become NaN.
        mask = torch.where(self._positions[:kv_length] <= places[:, :, None], self._visible, self._hidden)[:, None]
        # The cache goes by place: the name of that argument changes within transformers 5.
        output = self.model(ids, mask, places.clamp(min=0), cache, use_cache=True, logits_to_keep=num_logits)
        logits: torch.Tensor = output.logits[:, -num_logits:]
        return logits

    @torch.inference_mode()
    def _tried(self, max_context_tokens: int, *, num_rows: int) -> LeanDecoder | None:
        """The lean pass, where the model has one and its logits are those of the model."""
        try:
            lean = lean_decoder(self.model, max_context_tokens=max_context_tokens)
        except LeanRefusedError:
            return None
        num_tokens = min(_TRIAL_TOKENS, max_context_tokens)
        expected = self._trial(self._plain, num_rows=num_rows, num_tokens=num_tokens)
        found = self._trial(lean.forward, num_rows=num_rows, num_tokens=num_tokens)
        limit = _TOLERANCES[self._dtype] * max(1.0, float(expected.abs().max()))
        # False too where a logit is not finite.
        return lean if bool(((found - expected).abs() <= limit).all()) else None

    def _trial(self, compute: Callable[..., torch.Tensor], *, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Logits of prompts of two lengths, then of one token behind each. The slots are wiped after that."""
        width = num_tokens - 1
        num_padded = min(3, max(0, width - 1))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (num_rows, num_tokens), generator=generator).to(self._device)
        shifts = torch.tensor([0, num_padded], device=self._device)[:num_rows, None]
        places = (torch.arange(num_tokens, device=self._device) - shifts).clamp(min=-1)
        logits = []
        for start, end, num_logits in ((0, width, width - num_padded), (width, num_tokens, 1)):
            if start < end:
                found = compute(
                    ids[:, start:end],
                    places[:, start:end],
                    cache=self.cache,
                    rows=slice(0, num_rows),
                    kv_length=end,
                    num_logits=num_logits,
                )
                logits.append(found.float())
        for slot in range(num_rows):
            self.cache.wipe(slot)
        return torch.cat(logits, dim=1)


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
