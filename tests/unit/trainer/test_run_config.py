"""A run's configuration: cross-checks in one clear line, and the run folder."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from driftgym.errors import ConfigError
from driftgym.trainer.run_config import (
    RunConfig,
    check_run_dir,
    load_resolved,
    load_run_config,
    make_run_dir,
    settings_of,
)

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
BASE: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "env": {"id": "driftgym/Lookup-v0"},
    "agent": {"max_context_tokens": 512},
}


def load(folder: Path, *overrides: str, data: dict[str, Any] | None = None) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(BASE if data is None else data))
    return load_run_config(path, overrides)


def test_a_relative_model_starts_at_the_file_and_a_named_one_stays(tmp_path: Path) -> None:
    assert load(tmp_path).model.path == str(tmp_path / "models/tiny")
    assert load(tmp_path, "model.path=smollm2").model.path == "smollm2"
    assert load(tmp_path, "model.path=/abs/model").model.path == "/abs/model"


def test_overrides_reach_every_section(tmp_path: Path) -> None:
    config = load(tmp_path, "sandbox.kind=docker", "trainer.max_steps=20", "learner.objective.name=ppo")
    assert (config.sandbox.kind, config.trainer.max_steps, config.learner.objective.name) == ("docker", 20, "ppo")
    assert settings_of(config)["trainer"]["max_steps"] == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.mode=sync", "trainer.max_lag=8"], "trainer: mode sync needs max_lag: 0"),
        (
            ["trainer.mode=one_step_off", "trainer.max_lag=2"],
            "mode one_step_off needs max_lag: 1, publish_every_steps: 1",
        ),
        (["trainer.mode=one_step_off", "trainer.publish_every_steps=2"], "mode one_step_off needs max_lag: 1"),
        (
            ["trainer.placement=colocated", "trainer.weight_update=in_flight"],
            "placement colocated needs weight_update: d",
        ),
        (
            ["trainer.placement=colocated", "trainer.publish_every_steps=2"],
            "placement colocated needs weight_update: dr",
        ),
        (
            ["trainer.placement=colocated", "generator.keep_kv=true"],
            "keep_kv goes with trainer.weight_update: in_flight",
        ),
        (["trainer.placement=colocated", "generator.num_servers=2"], "set generator.num_servers from 2 to 1"),
        (["trainer.placement=colocated", "generator.device=cuda"], "set generator.device from cuda to cpu"),
        (["trainer.placement=colocated", "model.dtype=bfloat16"], "set model.dtype from bfloat16 to float32"),
        (
            ["trainer.placement=colocated", "generator.kind=sglang", "generator.urls=[http://localhost:1]"],
            "colocated goes with generator.kind: embedded",
        ),
        (["trainer.placement=beside"], "trainer.placement"),
        (["generator.iteration_tokens=8", "trainer.mode=sync"], "set trainer.max_lag to 1 at least"),
        (
            ["generator.iteration_tokens=8", "trainer.max_lag=0", "trainer.publish_every_steps=1"],
            "set trainer.max_lag to 1 at least",
        ),
        (["trainer.mode=sync", "trainer.weight_update=in_flight"], "trainer: mode sync needs max_lag: 0"),
        (["trainer.mode=snyc"], "trainer.mode"),
        (["trainer.mode=sync", "trainer.on_lag=mask"], "goes with on_lag: wait"),
        (["limits.tool_call_s=.inf"], "limits.tool_call_s: Input should be a finite number"),
        (["learner.objective={name: ppo, eps_hihg: 1}"], "did you mean 'eps_high'"),
        (["trainer.publish_every_steps=10"], "publish_every_steps 10 is above max_lag"),
        (["trainer.max_in_flight_groups=3"], "below groups_per_step 4"),
        (["trainer.on_lag=wiat"], "trainer.on_lag"),
        (["trainer.max_step=3"], "did you mean 'max_steps'"),
        (["trainer.max_steps=many"], "trainer.max_steps"),
        (["agent.top_p=0.9"], "agent.top_p must be 1"),
        (["agent.temperature=0"], "agent.temperature must be above 0"),
        (["agent.max_context_tokens=4096"], "above generator.max_context_tokens"),
        (["sandbox.pool.max_boxes=127"], "sandbox.pool.max_boxes: 127 is below the 128 boxes in use at once"),
        (["trainer.max_in_flight_groups=33"], "trainer.max_in_flight_groups x group_size = 264 episodes play at once"),
        (["sandbox.pool.max_memory_bytes=1000000000"], "sandbox.pool.max_memory_bytes: 1000000000 is below"),
        (["sandbox.pool.reuse=reset", "sandbox.spec.read_only_root=false"], "sandbox.pool.reuse: reset does not go"),
        (["name=a/b"], "name"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "run.yaml"))
    assert len(str(caught.value).splitlines()) == 1


def test_a_pool_of_just_enough_boxes_is_taken(tmp_path: Path) -> None:
    memory = f"sandbox.pool.max_memory_bytes={128 * 256 * 1024 * 1024}"
    assert load(tmp_path, "sandbox.pool.max_boxes=128", memory).num_slots == 128


def test_the_bound_on_publications_at_the_limit_and_one_beyond(tmp_path: Path) -> None:
    load(tmp_path, "trainer.max_lag=3", "trainer.publish_every_steps=4")
    with pytest.raises(ConfigError):
        load(tmp_path, "trainer.max_lag=3", "trainer.publish_every_steps=5")


@pytest.mark.parametrize("given", [[], ["trainer.max_lag=0"], ["trainer.publish_every_steps=1"]])
def test_the_mode_sync_settles_what_is_not_given(tmp_path: Path, given: list[str]) -> None:
    trainer = load(tmp_path, "trainer.mode=sync", *given).trainer
    assert (trainer.max_lag, trainer.weight_update, trainer.publish_every_steps) == (0, "drain", 1)
    assert load(tmp_path).trainer.max_lag > 0


@pytest.mark.parametrize("update", ["drain", "abort_resume", "in_flight"])
def test_one_step_off_settles_what_is_not_given(tmp_path: Path, update: str) -> None:
    trainer = load(tmp_path, "trainer.mode=one_step_off", f"trainer.weight_update={update}").trainer
    assert (trainer.max_lag, trainer.weight_update, trainer.publish_every_steps) == (1, update, 1)


@pytest.mark.parametrize(("mode", "max_lag"), [("sync", 0), ("one_step_off", 1), ("async", 8)])
def test_colocated_settles_what_is_not_given_in_each_mode(tmp_path: Path, mode: str, max_lag: int) -> None:
    trainer = load(tmp_path, "trainer.placement=colocated", f"trainer.mode={mode}").trainer
    assert (trainer.max_lag, trainer.weight_update, trainer.publish_every_steps) == (max_lag, "drain", 1)


def test_a_resolved_configuration_comes_back_the_same(tmp_path: Path) -> None:
    config = load(
        tmp_path, f"run_dir={tmp_path / 'run'}", "learner.objective.name=ppo", "learner.objective.eps_high=0.5"
    )
    run_dir = make_run_dir(config)
    again, folder = load_resolved(run_dir)
    assert again == config
    assert folder == run_dir == tmp_path / "run"
    with pytest.raises(ConfigError, match="holds a run already"):
        check_run_dir(config)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        load_resolved(tmp_path)


def test_a_run_folder_below_a_file_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = load(tmp_path, f"run_dir={tmp_path / 'file' / 'run'}")
    for attempt in (check_run_dir, make_run_dir):
        with pytest.raises(ConfigError, match="is not a folder; choose another folder"):
            attempt(config)


def test_a_run_without_a_folder_gets_one_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = make_run_dir(load(tmp_path, "name=lookup"))
    assert run_dir.parent == tmp_path / "runs"
    assert run_dir.name.startswith("lookup-2")


@pytest.mark.parametrize("part", ["journal.sqlite", "checkpoints"])
def test_a_folder_that_holds_parts_of_a_run_is_not_mixed_with_another(tmp_path: Path, part: str) -> None:
    config = load(tmp_path, f"run_dir={tmp_path / 'run'}")
    run_dir = make_run_dir(config)
    (run_dir / "journal.sqlite").write_bytes(b"x")
    (run_dir / "config.resolved.yaml").unlink()
    for other in {"journal.sqlite"} - {part}:
        (run_dir / other).unlink()
    with pytest.raises(ConfigError, match=f"holds {part} of a run whose config.resolved.yaml is missing"):
        make_run_dir(config)
    assert not (run_dir / "config.resolved.yaml").exists()


def test_a_run_folder_whose_name_the_system_refuses_is_one_clear_line(tmp_path: Path) -> None:
    config = load(tmp_path, f"run_dir={tmp_path / ('x' * 300)}")
    with pytest.raises(ConfigError, match="File name too long"):
        check_run_dir(config)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_that_comes_with_the_code_loads(path: Path) -> None:
    config = load_run_config(path)
    assert config.name == path.stem
    assert config.model.path == "smollm2" or (Path(config.model.path) / "config.json").is_file()


def test_the_scalerl_recipe_has_all_its_parts() -> None:
    config = load_run_config(CONFIGS / "scalerl.yaml")
    trainer = config.trainer
    assert config.learner.objective.name == "cispo"
    assert config.learner.normalisation == "prompt"
    assert (trainer.advantage, trainer.zero_variance) == ("batch_normalised", "filter")
    assert (trainer.solved_above, trainer.num_tasks) == (0.9, 2048)
    assert config.agent.interrupt_after_tokens is not None
    assert (trainer.mode, trainer.max_lag, trainer.weight_update) == ("async", 8, "in_flight")
