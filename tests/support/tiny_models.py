"""Tiny random models whose distributions are far from even, one folder for each version of the weights."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 100


def save_tiny_models(root: Path, *, count: int = 3) -> list[Path]:
    """Folders of one model's shape; the place in the list is the version."""
    return [save_tiny_model(root / str(version), seed=version) for version in range(count)]


def save_tiny_model(folder: Path, *, seed: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes a model with random weights; returns the folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
