"""LoRA adapters as they are published: peft reads them, and what it makes of them is what the learner merges."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from driftgym.trainer.adapters import adapters_of
from driftgym.trainer.learner import Learner
from driftgym.trainer.model_loading import named_weights
from driftgym.trainer.training_client import LearnerSpec, LoraConfig, ModelConfig
from driftgym.types import Segment, WeightUpdate

# What peft asks of a model is deprecated in transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def spec(learner_spec: Callable[..., LearnerSpec], tmp_path: Path) -> LearnerSpec:
    """Of a learner that trains adapters for engines which take them."""
    base = Learner(learner_spec()).publish(tmp_path / "model")
    model = ModelConfig(path="m", lora=LoraConfig(rank=4, alpha=8.0))
    return dataclasses.replace(
        learner_spec(), model=model, model_folder=Path(base.location), publishes=("full", "delta", "lora")
    )


@pytest.fixture
def segments(make_segment: Callable[..., Segment]) -> list[Segment]:
    return [make_segment(seed=1), make_segment(seed=2, advantage=-0.5)]


def by_peft(full: WeightUpdate, adapter: WeightUpdate) -> Mapping[str, Tensor]:
    """The weights after peft has merged the published adapter into the published full weights."""
    model = AutoModelForCausalLM.from_pretrained(full.location, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, adapter.location)
    return dict(loaded.merge_and_unload().state_dict())


def published_whole(learner: Learner, folder: Path) -> Mapping[str, Tensor]:
    return load_file(Path(learner.publish(folder, is_last=True).location, "model.safetensors"))


def test_peft_makes_the_same_weights_of_it_as_the_learner(
    spec: LearnerSpec, segments: list[Segment], tmp_path: Path
) -> None:
    learner = Learner(spec)
    full = learner.publish(tmp_path / "weights")
    for _ in range(2):
        learner.train_step(segments)
        update = learner.publish(tmp_path / "weights")
        assert (full.kind, update.kind, update.base_policy_version) == ("full", "lora", 0)
    before = load_file(Path(full.location, "model.safetensors"))
    found = by_peft(full, update)
    expected = published_whole(learner, tmp_path / "whole")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    changed = {name.split(".")[-2] for name, tensor in expected.items() if not torch.equal(before[name], tensor)}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_of_a_life_that_went_on_from_a_checkpoint_are_put_on_merged_weights(
    spec: LearnerSpec, segments: list[Segment], tmp_path: Path
) -> None:
    first = Learner(spec)
    first.train_step(segments)
    first.save(tmp_path / "1")
    learner = Learner(dataclasses.replace(spec, incarnation=2))
    learner.load(tmp_path / "1", policy_version=1)
    full = learner.publish(tmp_path / "weights")
    learner.train_step(segments)
    update = learner.publish(tmp_path / "weights")
    assert (full.kind, update.kind, update.base_policy_version) == ("full", "lora", 1)
    expected, found = published_whole(learner, tmp_path / "whole"), by_peft(full, update)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


def test_engines_that_take_full_weights_alone_get_adapters_merged(
    spec: LearnerSpec, segments: list[Segment], tmp_path: Path
) -> None:
    learner = Learner(dataclasses.replace(spec, publishes=("full",)))
    learner.publish(tmp_path)
    learner.train_step(segments)
    assert learner.publish(tmp_path).kind == "full"


def test_a_model_without_adapters_has_none_and_unlike_ones_are_left_to_merging(spec: LearnerSpec) -> None:
    plain = AutoModelForCausalLM.from_pretrained(spec.model_folder)
    assert adapters_of(plain) is None
    unlike = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 4})
    assert adapters_of(peft.inject_adapter_in_model(unlike, plain, adapter_name="default")) is None
    assert sum("q_proj" in name for name, _ in named_weights(plain)) == 2
