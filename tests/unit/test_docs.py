"""The docs are true: their code runs and prints what they say, their configurations load, and they name every key."""

import itertools
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import typer.main

from driftgym.agents.episode import INTERRUPTED
from driftgym.agents.generators.restarts import BEHIND, JOINED, LEFT, LOST, NOT_RESTARTED, RESTARTED, RETURNED
from driftgym.agents.rollout import COMPLETION_CUT, STEP_CUT
from driftgym.cli import app
from driftgym.config import Config
from driftgym.trainer.run_config import RunConfig, load_run_config
from driftgym.trainer.tally import Tally
from driftgym.trainer.training_client import LearnerConfig, LearnerSpec, ModelConfig, WarmupConfig
from driftgym.types import Segment, TrajectoryStatus, float32_array, int32_array

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *("objectives", "architecture", "environments", "generators", "lag-rules", "low-level", "metrics", "runs"),
    "sandboxes",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCE_PATH = re.compile(r"`((?:src|sandboxes|envs|agents|trainer|configs|tests|benchmarks)/[\w./-]+)`")
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
SCRIPTED_RUN = ROOT / "tests" / "support" / "scripted_run.py"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str) -> list[tuple[str, str]]:
    return BLOCK.findall(page(name))


def files_of(name: str) -> dict[str, str]:
    """The blocks of a page that begin with the name of a file."""
    named = ((FILE_NAME.match(text), text) for _, text in blocks(name))
    return {match.group(1): text for match, text in named if match}


def outputs_of(name: str) -> Iterator[tuple[str, str]]:
    """Each Python file of a page that is followed by a text block: the file, and that text."""
    found = blocks(name)
    for (language, text), (next_language, output) in itertools.pairwise(found):
        match = FILE_NAME.match(text)
        if language == "python" and match and next_language == "text":
            yield match.group(1), output


def run_python(folder: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints in `folder`, whose modules it can import."""
    finished = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds every file that a page shows, and the model that the configurations name."""
    for name in PAGES:
        for file_name, text in files_of(name).items():
            (tmp_path / file_name).write_text(text, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


RUNNABLE = [(name, *shown) for name in PAGES for shown in outputs_of(name)]


@pytest.mark.parametrize(("name", "file_name", "output"), RUNNABLE, ids=[shown[1] for shown in RUNNABLE])
def test_code_prints_what_the_page_says(folder: Path, name: str, file_name: str, output: str) -> None:
    assert run_python(folder, file_name) == output


def test_the_example_environment_is_sound(folder: Path) -> None:
    printed = run_python(folder, "-m", "driftgym.cli", "env", "check", "my_envs:my/Count-v0")
    assert printed == "my_envs:my/Count-v0: sound\n"


@pytest.mark.parametrize("file_name", sorted({f for name in PAGES for f in files_of(name) if f.endswith(".yaml")}))
def test_configurations_load(folder: Path, file_name: str) -> None:
    config = load_run_config(folder / file_name)
    assert (Path(config.model.path) / "config.json").is_file()


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    command = typer.main.get_command(app)
    shell = "".join(text for language, text in blocks(name) if language == "bash")
    for line in re.findall(r"^(?:\w+=\S+ )*driftgym (.*)$", shell, re.MULTILINE):
        words = line.split()
        known: Any = command
        while hasattr(known, "commands"):
            assert words[0] in known.commands, line
            known = known.commands[words.pop(0)]
        options = {option for parameter in known.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_exist(name: str) -> None:
    missing = [path for path in SOURCE_PATH.findall(page(name)) if not (ROOT / path).exists()]
    assert not missing


def sections_in(annotation: Any) -> list[type[Config]]:
    """The configurations that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in sections_in(part)]


def config_rows(model: type[Config], prefix: str = "") -> Iterator[str]:
    """For each field: how its line in the table of docs/runs.md begins."""
    for name, field in model.model_fields.items():
        sections = sections_in(field.annotation)
        is_plain_section = len(sections) == 1 and field.default is not None
        is_tag = len(typing.get_args(field.annotation)) == 1  # a literal of one value: which of several sections it is
        if not is_plain_section and not is_tag:
            yield f"| `{prefix}{name}` | {shown_default(field)} |"
        for section in sections:
            yield from config_rows(section, f"{prefix}{name}.")


def shown_default(field: pydantic.fields.FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    return "null" if value is None else f"`{json.dumps(value)}`"


def test_every_field_of_a_run_is_in_the_table_with_its_default() -> None:
    lines = page("runs").splitlines()
    missing = [row for row in config_rows(RunConfig) if not any(line.startswith(row) for line in lines)]
    assert not missing


def test_the_table_has_no_field_that_a_run_does_not_have() -> None:
    rows = set(config_rows(RunConfig))
    shown = re.findall(r"^(\| `[a-z_.]+` \| [^|]+ \|) [^|]* \| [^|]+ \|$", page("runs"), re.MULTILINE)
    assert shown
    assert set(shown) <= rows


def scripted_run(folder: Path) -> Path:
    """The folder of a short run with scripted parts."""
    run_python(folder, str(SCRIPTED_RUN), str(folder / "run"), "trainer.max_steps=2")
    return folder / "run"


def test_every_key_of_a_row_and_of_the_summary_is_defined(tmp_path: Path) -> None:
    run_dir = scripted_run(tmp_path)
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    own = {key for key in row if not key.startswith(("learner/", "events/"))}
    assert not {key for key in own if f"`{key}`" not in page("metrics")}
    summary = json.loads((run_dir / "summary.json").read_text())
    keys = {*summary, *(f"errors.{fault}" for fault in summary["errors"])}
    assert not {key for key in keys if f"`{key}`" not in page("runs")}
    names = {path.name for path in run_dir.iterdir()}
    assert not {name for name in names if f"`{name}" not in page("runs")}


def test_every_metric_of_the_learner_is_defined() -> None:
    from driftgym.trainer.learner import Learner

    folder = ROOT / "configs" / "models" / "tiny-qwen3"
    spec = LearnerSpec(
        model=ModelConfig(path=str(folder), init="random"),
        model_folder=folder,
        config=LearnerConfig(),
        warmup=WarmupConfig(),
        seed=0,
        temperature=1.0,
        incarnation=1,
    )
    mask = np.arange(4) >= 2
    segment = Segment(
        trajectory_id="t",
        segment_index=0,
        token_ids=int32_array([5, 6, 7, 8]),
        loss_mask=mask,
        behaviour_logprobs=float32_array(np.where(mask, -1.0, 0.0)),
        policy_versions=int32_array(np.where(mask, 0, -1)),
        advantages=float32_array(np.where(mask, 1.0, 0.0)),
    )
    report = Learner(spec).train_step([segment])
    assert not {key for key in report.metrics if f"`learner/{key}`" not in page("metrics")}


def test_every_event_of_a_run_is_defined() -> None:
    tally = Tally()
    tally.add(status=TrajectoryStatus.TRUNCATED_TIME, events={}, num_retries=1)
    of_tools = {"policy_error", "unknown_tool", "tool_timeout", "tool_output_truncated"}
    of_pool = {BEHIND, JOINED, LEFT, LOST, NOT_RESTARTED, RESTARTED, RETURNED}
    events = {*tally.events, *of_tools, *of_pool, COMPLETION_CUT, INTERRUPTED, STEP_CUT}
    assert not {event for event in events if f"`{event}`" not in page("metrics")}
