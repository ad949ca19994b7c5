"""Tiny random models, engines over them, and an embedded server in the test's own loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from driftgym.agents.generators.embedded.engine import Engine
from driftgym.agents.generators.embedded.loop import EngineLoop
from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.agents.generators.embedded.server import listening

VOCAB_SIZE = 120
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough for distributions that are far from even
}


def make_model(family: str, *, seed: int = 0, is_tied: bool = True, **options: Any) -> Any:
    """A random model of `family`, one of transformers' model types; its biases and norms are random too."""
    torch.manual_seed(seed)
    shape = {**_SHAPE, "tie_word_embeddings": is_tied, **({"head_dim": 16} if family == "qwen3" else {}), **options}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model_of() -> Callable[..., Any]:
    return make_model


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Path]:
    def save(model: Any, name: str) -> Path:
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    def make(model: Any, *, max_batch_size: int = 8, max_context_tokens: int = 256, **options: Any) -> Engine:
        runner = ModelRunner(model, num_slots=max_batch_size, max_context_tokens=max_context_tokens)
        return Engine(
            runner,
            max_batch_size=max_batch_size,
            max_context_tokens=max_context_tokens,
            weight_version="1:0",
            **options,
        )

    return make


@pytest.fixture
def random_prompts() -> Callable[..., list[np.ndarray]]:
    def make(count: int, *, shortest: int = 3, longest: int = 40, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(shortest, longest + 1, count)
        return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]

    return make


@pytest.fixture
def served() -> Callable[[Engine], Any]:
    """Opens an embedded server over an engine in this loop; yields its root."""

    @contextlib.asynccontextmanager
    async def open_server(engine: Engine) -> AsyncIterator[str]:
        loop = EngineLoop(engine)
        running = asyncio.create_task(loop.run())
        try:
            async with listening(loop, model_path="tiny") as url:
                yield url
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    return open_server
