"""Tiny random models whose distributions are far from even, one folder for each version of the weights."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 100
SMALL_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
"""Of a model of two layers, as the configuration of most architectures names it."""


def save_tiny_models(root: Path, *, count: int = 3, **shape: int) -> list[Path]:
    """Folders of one model's shape; the place in the list is the version."""
    return [save_tiny_model(root / str(version), seed=version, **shape) for version in range(count)]


def save_tiny_model(
    folder: Path, *, seed: int, vocab_size: int = VOCAB_SIZE, head_dim: int = 16, is_tied: bool = True
) -> Path:
    """Writes a model with random weights; returns the folder."""
    torch.manual_seed(seed)
    model = _one_layer(vocab_size=vocab_size, width=32, num_heads=2, head_dim=head_dim, is_tied=is_tied)
    model.save_pretrained(folder)
    return folder


def save_model_of_fixed_logits(folder: Path, logits: Sequence[float]) -> Path:
    """A model whose logits are these, whatever it reads: its layer adds nothing to embeddings that are all the same."""
    width = 4
    model = _one_layer(vocab_size=len(logits), width=width, num_heads=1, head_dim=width, is_tied=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None] / width * torch.ones(width))
    model.save_pretrained(folder)
    return folder


def _one_layer(*, vocab_size: int, width: int, num_heads: int, head_dim: int, is_tied: bool) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config)


def save_tiny_tokenizer(folder: Path) -> None:
    """Adds a tokenizer of one word for each id, for servers that do not start without."""
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
