"""Weights in three kinds: whole, what changed, and adapters on a base; each exact, or refused with all as it was."""

import hashlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import WeightsRefusedError
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams, WeightUpdate

ADAPTER_FILE = "adapter_model.safetensors"


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def take(engine: Any, folder: Path, **order: Any) -> None:
    """Brings the engine to the weights in `folder`, flushing its cache."""
    engine.update_weights(engine.weights.read(WeightsOrder(folder=folder, **order)), flush_cache=True)


def save_delta(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Writes a delta; returns its checksum."""
    folder.mkdir()
    save_file(tensors, folder / "delta.safetensors")
    return checksum(folder / "delta.safetensors")


def checksum(file: Path) -> str:
    return "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()


def save_adapter(model: Any, folder: Path, *, seed: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    """Writes a random adapter for `model`, which it uses up; returns the merged weights, as peft merges them."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers, and about embeddings that it unties
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        adapted.save_pretrained(folder)
        return tensors_of(adapted.merge_and_unload())


@pytest.mark.parametrize("is_tied", [True, False])
def test_deltas_follow_one_another(model_of, engine_of, tmp_path, is_tied):
    model = model_of("llama", is_tied=is_tied)
    engine = engine_of(model)
    expected = tensors_of(model)
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
    for version in (1, 2):
        changed = {name: torch.randn_like(expected[name]) for name in names}
        digest = save_delta(tmp_path / str(version), changed)
        order = {"kind": "delta", "base_version": f"1:{version - 1}", "checksum": digest}
        take(engine, tmp_path / str(version), version=f"1:{version}", **order)
        expected |= changed
        if is_tied:
            expected["lm_head.weight"] = changed[names[0]]
        assert_same(model, expected)
    assert (engine.version, engine.weights.base_version) == ("1:2", "1:2")
    save_delta(tmp_path / "nothing", {})
    take(engine, tmp_path / "nothing", version="1:3", kind="delta", base_version="1:2")
    assert_same(model, expected)


def test_an_adapter_is_put_on_the_base_in_the_place_of_the_one_before(model_of, engine_of, save_model, tmp_path):
    model = model_of("qwen3", is_tied=False)
    engine = engine_of(model)
    before = tensors_of(model)
    options = {"kind": "lora", "base_version": "1:0"}
    for version, config in enumerate(
        [
            {},
            {"target_modules": ["v_proj", "up_proj"], "r": 2},
            {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 5}},
            {"target_modules": ["embed_tokens", "lm_head"]},
        ],
        start=1,
    ):
        merged = save_adapter(model_of("qwen3", is_tied=False), tmp_path / str(version), seed=version, **config)
        digest = checksum(tmp_path / str(version) / ADAPTER_FILE)
        take(engine, tmp_path / str(version), version=f"1:{version}", checksum=digest, **options)
        assert_same(model, merged)
        assert (engine.version, engine.weights.base_version) == (f"1:{version}", "1:0")
    with pytest.raises(WeightsRefusedError, match=r"put on 1:4, here are 1:0: send full weights"):
        take(engine, tmp_path / "1", version="1:5", kind="lora", base_version="1:4")
    # Whole weights, and changes to what is there, are a new base.
    save_delta(tmp_path / "delta", {"model.norm.weight": before["model.norm.weight"] * 2})
    take(engine, tmp_path / "delta", version="1:5", kind="delta", base_version="1:4")
    with pytest.raises(WeightsRefusedError, match=r"put on 1:0, here are 1:5"):
        take(engine, tmp_path / "1", version="1:6", **options)
    take(engine, save_model(model_of("qwen3", is_tied=False), "full"), version="1:6")
    assert_same(model, before)
    merged = save_adapter(model_of("qwen3", is_tied=False), tmp_path / "again", seed=9)
    take(engine, tmp_path / "again", version="1:7", kind="lora", base_version="1:6")
    assert_same(model, merged)


def test_an_adapter_on_weights_of_half_precision(model_of, engine_of, tmp_path):
    model = model_of("qwen3").bfloat16()
    save_adapter(model_of("qwen3"), tmp_path / "lora", target_modules=["q_proj"])
    adapter = load_file(tmp_path / "lora" / ADAPTER_FILE)
    name = "model.layers.0.self_attn.q_proj"
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = model.state_dict()[f"{name}.weight"] + (up @ down * 2.0).bfloat16()
    take(engine_of(model), tmp_path / "lora", version="1:1", kind="lora", base_version="1:0")
    assert torch.equal(model.state_dict()[f"{name}.weight"], expected)


def refused(tmp_path: Path, model_of: Any) -> list[tuple[str, dict]]:
    """What is in each folder, and what it is said to be."""
    shape = model_of("qwen3").state_dict()["model.norm.weight"].shape
    save_delta(tmp_path / "unknown", {"no.such.weight": torch.ones(2)})
    save_delta(tmp_path / "shape", {"model.norm.weight": torch.ones(3)})
    save_delta(tmp_path / "good", {"model.norm.weight": torch.ones(shape)})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "delta.safetensors").write_bytes(b"nonsense")
    for name, config in [
        ("dora", {"use_dora": True}),
        ("bias", {"bias": "lora_only"}),
        ("saved", {"modules_to_save": ["lm_head"]}),
        ("tied", {"target_modules": ["embed_tokens"]}),
        ("adapter", {}),
        ("partial", {}),
        ("nonsense", {}),
    ]:
        save_adapter(model_of("qwen3", is_tied=False), tmp_path / name, **config)
    save_adapter(model_of("llama"), tmp_path / "narrow", target_modules=["q_proj"])
    tensors = load_file(tmp_path / "partial" / ADAPTER_FILE)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, tmp_path / "partial" / ADAPTER_FILE)
    config = json.loads((tmp_path / "narrow" / "adapter_config.json").read_text())
    (tmp_path / "narrow" / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    (tmp_path / "nonsense" / "adapter_config.json").write_text("[")
    delta, lora = {"kind": "delta", "base_version": "1:0"}, {"kind": "lora", "base_version": "1:0"}
    return [
        *((name, delta) for name in ("absent", "unknown", "shape", "broken")),
        ("good", {**delta, "base_version": "1:1"}),
        ("good", {**delta, "base_version": "2:0"}),
        ("good", {**delta, "checksum": "sha256:" + "0" * 64}),
        ("good", {"kind": "full"}),
        ("good", lora),
        *((name, lora) for name in ("absent", "dora", "bias", "saved", "tied", "partial", "narrow", "nonsense")),
        ("adapter", {**lora, "base_version": "1:1"}),
        ("adapter", {**lora, "checksum": "sha256:0"}),
    ]


def test_what_does_not_fit_is_refused_and_changes_nothing(model_of, engine_of, tmp_path):
    model = model_of("qwen3")
    engine = engine_of(model)
    before = tensors_of(model)
    for name, order in refused(tmp_path, model_of):
        with pytest.raises(WeightsRefusedError) as error:
            take(engine, tmp_path / name, version="1:1", **order)
        assert len(str(error.value).splitlines()) == 1, error.value
        assert engine.version == "1:0"
        assert_same(model, before)
    take(engine, tmp_path / "adapter", version="1:1", kind="lora", base_version="1:0")


WITHOUT_PEFT = """
import sys
sys.modules["peft"] = None
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import ModelWeights, WeightsRefusedError, kinds_of_weights
assert kinds_of_weights() == ["full", "delta"]
shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=1))
try:
    ModelWeights(model, version="1:0").read(
        WeightsOrder(folder=Path("x"), version="1:1", kind="lora", base_version="1:0")
    )
except WeightsRefusedError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_peft_an_adapter_is_refused_with_what_to_do():
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_PEFT], capture_output=True, text=True, timeout=100, check=False
    )
    assert "pip install driftgym[lora]" in done.stdout, done.stderr


def ask(generator, prompt, *, request_id="r", max_tokens=10):
    return generator.generate(
        prompt,
        SamplingParams(max_tokens=max_tokens),
        request_id=request_id,
        session_id="s",
        deadline_s=time.monotonic() + 60,
    )


async def test_all_kinds_through_the_client(model_of, engine_of, served, save_model, tmp_path):
    """A delta on the wrong base is refused, and whole weights mend that."""
    model = model_of("qwen3")
    engine = engine_of(model)
    norm = torch.full_like(tensors_of(model)["model.norm.weight"], 1.5)

    def update(version, name, file_name, **options):
        folder = tmp_path / name
        return WeightUpdate(
            policy_version=version,
            incarnation=1,
            location=str(folder),
            checksum=checksum(folder / file_name),
            **options,
        )

    save_delta(tmp_path / "delta", {"model.norm.weight": norm})
    merged = save_adapter(model_of("qwen3", seed=3), tmp_path / "lora")
    save_model(model_of("qwen3", seed=3), "full")
    async with served(engine) as url, SGLangGenerator(url, incarnation=1, max_concurrency=8) as generator:
        delta = update(1, "delta", "delta.safetensors", kind="delta", base_policy_version=0)
        await generator.update_weights(delta, mode="in_flight", timeout_s=30)
        assert torch.equal(model.state_dict()["model.norm.weight"], norm)
        assert set((await ask(generator, [1, 2, 3])).policy_versions.tolist()) == {1}
        with pytest.raises(GeneratorError, match="here are 1:1: send full weights first"):
            await generator.update_weights(delta, mode="in_flight", timeout_s=30)
        with pytest.raises(GeneratorError, match="unknown since an update failed"):
            await ask(generator, [1, 2, 3])
        await generator.update_weights(update(2, "full", "model.safetensors"), mode="in_flight", timeout_s=30)
        lora = update(3, "lora", ADAPTER_FILE, kind="lora", base_policy_version=2)
        await generator.update_weights(lora, mode="drain", timeout_s=30)
        assert_same(model, merged)
        completion = await ask(generator, [1, 2, 3])
        assert set(completion.policy_versions.tolist()) == {3}
        scores = await generator.score(
            [1, 2, 3, *completion.token_ids.tolist()], num_given=3, deadline_s=time.monotonic() + 30
        )
        np.testing.assert_allclose(scores.logprobs, completion.logprobs, atol=1e-4)
