"""A model of a few thousand weights, and segments for it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from driftgym.trainer.training_client import LearnerConfig, LearnerSpec, ModelConfig, WarmupConfig
from driftgym.types import Segment

VOCAB_SIZE = 61
NUM_SPECIAL = 3


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json and a tokenizer, and no weights."""
    folder = tmp_path_factory.mktemp("tiny-model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    }
    special = [{"id": i, "content": f"<s{i}>", "special": True} for i in range(NUM_SPECIAL)]
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = {"added_tokens": special, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w3"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture
def learner_spec(tiny_model_folder: Path) -> Callable[..., LearnerSpec]:
    """Makes the specification of a learner of the tiny model."""

    def make(*, temperature: float = 1.0, warmup: WarmupConfig | None = None, **config: object) -> LearnerSpec:
        return LearnerSpec(
            model=ModelConfig(path=str(tiny_model_folder), init="random"),
            model_folder=tiny_model_folder,
            config=LearnerConfig.model_validate({"optimizer": {"learning_rate": 1e-2}, **config}),
            warmup=warmup or WarmupConfig(),
            seed=7,
            temperature=temperature,
            incarnation=1,
        )

    return make


@pytest.fixture
def make_segment() -> Callable[..., Segment]:
    """Makes a segment of random tokens: a prompt, then an answer, a tool's result, and an answer."""

    def make(
        *,
        seed: int,
        advantage: float = 1.0,
        version: int = 0,
        num_prompt: int = 7,
        spans: tuple[int, int, int] = (4, 3, 5),
        trajectory_id: str | None = None,
    ) -> Segment:
        rng = np.random.default_rng(seed)
        mask = np.repeat([False, True, False, True], [num_prompt, *spans])
        return Segment(
            trajectory_id=trajectory_id or f"t{seed}",
            segment_index=0,
            token_ids=rng.integers(0, VOCAB_SIZE, len(mask)),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask, rng.uniform(-5, -3, len(mask)), 0.0),
            policy_versions=np.where(mask, version, -1),
            advantages=np.where(mask, advantage, 0.0),
        )

    return make
