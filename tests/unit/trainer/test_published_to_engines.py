"""What is published, taken by the embedded engine: deltas and adapters give it the weights of a full publication."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import ModelWeights, WeightsRefusedError
from driftgym.agents.generators.launch import GeneratorConfig, start_embedded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError
from driftgym.trainer.learner import Learner
from driftgym.trainer.training_client import LearnerSpec, LoraConfig, ModelConfig
from driftgym.trainer.weights import WeightPublisher
from driftgym.types import Segment, WeightUpdate

KINDS = ("full", "delta", "lora")
TOKEN_IDS = [5, 17, 23, 9, 41, 33, 8, 12]
LIMIT_S = 60.0


@pytest.fixture
def model_folder(learner_spec: Callable[..., LearnerSpec], tmp_path: Path) -> Path:
    """The tiny model with weights."""
    return Path(Learner(learner_spec()).publish(tmp_path / "model").location)


class LastLayer:
    """Publishes weights of which the last layer alone changes."""

    def __init__(self, model_folder: Path, root: Path) -> None:
        self._tensors = load_file(model_folder / "model.safetensors")
        config = AutoModelForCausalLM.from_pretrained(model_folder).config.to_dict()
        self._publisher = WeightPublisher(
            root, config=config, tokenizer_folder=model_folder, incarnation=1, kinds=("full", "delta")
        )
        self._root = root

    def publish(self, version: int) -> WeightUpdate:
        """The next weights."""
        noise = torch.Generator().manual_seed(version)
        for name, tensor in self._tensors.items():
            if ".layers.1.mlp." in name and version:
                self._tensors[name] = tensor + torch.randn(tensor.shape, generator=noise) * 0.1
        return self._publisher.publish(self._tensors.items(), version)

    def tensors(self) -> Mapping[str, Tensor]:
        """All of them now."""
        return dict(self._tensors)


@pytest.fixture
def lora_learner(learner_spec: Callable[..., LearnerSpec], model_folder: Path) -> Learner:
    """Trains adapters on the tiny model."""
    spec = dataclasses.replace(learner_spec(), model_folder=model_folder, publishes=KINDS)
    return Learner(dataclasses.replace(spec, model=ModelConfig(path="m", lora=LoraConfig(rank=4, alpha=8.0))))


def order_of(update: WeightUpdate) -> WeightsOrder:
    base = None if update.base_policy_version is None else f"1:{update.base_policy_version}"
    return WeightsOrder(
        folder=Path(update.location),
        version=f"1:{update.policy_version}",
        kind=update.kind,
        base_version=base,
        checksum=update.checksum,
    )


def take(weights: ModelWeights, update: WeightUpdate) -> None:
    weights.take(weights.read(order_of(update)))


def assert_has(model: torch.nn.Module, tensors: Mapping[str, Tensor], *, tolerance: float = 0.0) -> None:
    own = model.state_dict()
    for name, tensor in tensors.items():
        torch.testing.assert_close(own[name], tensor, atol=tolerance, rtol=0.0, msg=name)


def test_deltas_give_the_engine_exactly_the_weights_of_a_full_publication(model_folder: Path, tmp_path: Path) -> None:
    source = LastLayer(model_folder, tmp_path / "weights")
    updates = [source.publish(version) for version in range(4)]
    assert [update.kind for update in updates] == ["full", "delta", "delta", "delta"]
    model = AutoModelForCausalLM.from_pretrained(updates[0].location)
    weights = ModelWeights(model, version="1:0")
    take(weights, updates[1])
    with pytest.raises(WeightsRefusedError, match="put on 1:2, here are 1:1"):
        take(weights, updates[3])
    for update in updates[2:]:
        take(weights, update)
    assert_has(model, source.tensors())


def test_adapters_give_the_engine_exactly_the_merged_weights(
    lora_learner: Learner, make_segment: Callable[..., Segment], tmp_path: Path
) -> None:
    full = lora_learner.publish(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(full.location)
    weights = ModelWeights(model, version="1:0")
    for seed in range(3):
        lora_learner.train_step([make_segment(seed=seed)])
        update = lora_learner.publish(tmp_path / "weights")
        assert update.kind == "lora"
        take(weights, update)
    whole = lora_learner.publish(tmp_path / "whole", is_last=True)
    assert_has(model, load_file(Path(whole.location, "model.safetensors")))


async def start(update: WeightUpdate, *, policy_version: int | None = None) -> SGLangGenerator:
    """An embedded server on a full publication, which it may call by another version."""
    return await start_embedded(
        Path(update.location),
        GeneratorConfig(max_batch_size=4, max_context_tokens=64),
        incarnation=1,
        policy_version=update.policy_version if policy_version is None else policy_version,
        timeout_s=LIMIT_S,
        close_timeout_s=LIMIT_S,
    )


@contextlib.asynccontextmanager
async def pool_on(update: WeightUpdate) -> AsyncIterator[tuple[GeneratorPool, SGLangGenerator]]:
    """A pool of one embedded server, and that; another takes its place when it is lost."""
    first = await start(update)
    pool: GeneratorPool

    async def restart() -> Generator:
        assert pool.latest_full is not None
        return await start(pool.latest_full)

    pool = GeneratorPool(
        [first], policy_version=update.policy_version, came_with=update, restart=restart, restart_timeout_s=LIMIT_S
    )
    try:
        yield pool, first
    finally:
        await pool.close()


async def scores(generator: Generator) -> tuple[Sequence[float], int]:
    """Log-probs that it gives, and its version."""
    scored = await generator.score(TOKEN_IDS, num_given=2, deadline_s=time.monotonic() + LIMIT_S)
    return scored.logprobs.tolist(), scored.version.policy_version


def expected_scores(folder: str | Path, tensors: Mapping[str, Tensor]) -> Sequence[float]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(dict(tensors), strict=False)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([TOKEN_IDS])).logits[0], -1)
    return [float(logprobs[index - 1, TOKEN_IDS[index]]) for index in range(2, len(TOKEN_IDS))]


@pytest.mark.slow
async def test_a_server_takes_deltas_and_one_on_another_base_refuses_them_and_begins_with_full_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    source = LastLayer(model_folder, tmp_path / "weights")
    full = source.publish(0)
    async with pool_on(full) as (pool, first):
        for version in (1, 2):
            update = source.publish(version)
            assert update.kind == "delta"
            await pool.update_weights(update, mode="in_flight", timeout_s=LIMIT_S)
        expected = expected_scores(full.location, source.tensors())
        np.testing.assert_allclose((await scores(first))[0], expected, atol=1e-5)
        stranger = await start(full, policy_version=7)
        with pytest.raises(GeneratorError, match="put on 1:1, here are 1:7"):
            await stranger.update_weights(update, mode="in_flight", timeout_s=LIMIT_S)
        await pool.add(stranger)
        assert await scores(stranger) == await scores(first)
        assert pool.min_version == 2


@pytest.mark.slow
async def test_a_server_takes_adapters_and_one_that_takes_its_place_gets_the_newest(
    lora_learner: Learner, make_segment: Callable[..., Segment], tmp_path: Path
) -> None:
    full = lora_learner.publish(tmp_path / "weights")
    async with pool_on(full) as (pool, first):
        for seed in range(2):
            lora_learner.train_step([make_segment(seed=seed)])
            update = lora_learner.publish(tmp_path / "weights")
            assert update.kind == "lora"
            await pool.update_weights(update, mode="in_flight", timeout_s=LIMIT_S)
        before = await scores(first)
        whole = lora_learner.publish(tmp_path / "whole", is_last=True)
        tensors = load_file(Path(whole.location, "model.safetensors"))
        np.testing.assert_allclose(before[0], expected_scores(whole.location, tensors), atol=1e-5)
        await first.close()
        async with asyncio.timeout(LIMIT_S):
            while await pool_scores(pool) != before:  # noqa: ASYNC110  # polls what has no event
                await asyncio.sleep(0.2)


async def pool_scores(pool: GeneratorPool) -> tuple[Sequence[float], int] | None:
    """None while no server answers."""
    with contextlib.suppress(GeneratorError):
        return await scores(pool)
    return None
