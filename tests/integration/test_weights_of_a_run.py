"""`driftgym train` as a user runs it: what it publishes, and servers that somebody else started."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from driftgym.agents.generators.launch import EmbeddedServer, GeneratorConfig
from driftgym.trainer.publications import read_publication
from driftgym.trainer.records import read_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "tiny-qwen3"
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.max_steps=6", "trainer.groups_per_step=2"),
    *("trainer.group_size=4", "trainer.max_in_flight_groups=4", "trainer.publish_every_steps=1"),
)


def quickstart(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The summary of a short quickstart."""
    command = [sys.executable, "-P", "-m", "driftgym.cli", "train", "configs/quickstart.yaml"]
    finished = subprocess.run(
        [*command, *SHORT, f"run_dir={run_dir}", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def publications(run_dir: Path) -> dict[int, str]:
    """The kinds of what stands at the end, by version."""
    updates = [read_publication(path) for path in (run_dir / "weights").iterdir()]
    return {update.policy_version: update.kind for update in updates}


def test_adapters_are_published_as_such_and_the_last_weights_as_a_model(tmp_path: Path) -> None:
    """The warm-up trains the adapters, so that those of a step are put on weights which have some merged in."""
    run_dir = tmp_path / "run"
    summary = quickstart(run_dir, "model.lora={rank: 8, alpha: 16}", "generator.num_servers=2")
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    assert publications(run_dir) == {0: "full", 5: "lora", 6: "full"}
    AutoModelForCausalLM.from_pretrained(run_dir / "weights" / "1-6")


@pytest.mark.parametrize("way", ["trainer.weight_update=abort_resume", "generator.keep_kv=true"])
def test_parts_of_an_answer_are_written_by_different_weights_and_learned_from_as_such(tmp_path: Path, way: str) -> None:
    """Also where the KV cache is kept: tokens that rest on older KV are not among those of `ratio_mean_at_lag0`."""
    run_dir = tmp_path / "run"
    summary = quickstart(run_dir, "generator.iteration_tokens=6", "generator.chunk_tokens=4", "trainer.max_lag=2", way)
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    assert summary["lag_max"] <= 2
    groups = [read_group(path) for path in (run_dir / "trajectories").iterdir()]
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    assert any(len(np.unique(turn.completion.policy_versions)) > 1 for turn in turns)
    rests_on_older = [turn.completion.kv_min_policy_version is not None for turn in turns]
    assert any(rests_on_older) == ("keep_kv" in way)


async def test_servers_that_somebody_else_started_are_given_the_weights_of_the_run(tmp_path: Path) -> None:
    """They come with other weights, of a version above those of the run, and of another life."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    await asyncio.to_thread(model.save_pretrained, tmp_path / "model")
    server = await EmbeddedServer.start(
        tmp_path / "model",
        GeneratorConfig(max_batch_size=32, max_context_tokens=256),
        incarnation=9,
        policy_version=100,
        timeout_s=120,
    )
    try:
        urls = f'generator.urls=["{server.url}"]'
        summary = await asyncio.to_thread(quickstart, tmp_path / "run", "generator.kind=sglang", urls)
        assert server.is_alive
    finally:
        await server.close(timeout_s=10)
    assert summary["ratio_mean_at_lag0"] == pytest.approx(1.0, abs=1e-3)
    assert summary["policy_version"] == 6
    assert set(publications(tmp_path / "run").values()) == {"full"}
