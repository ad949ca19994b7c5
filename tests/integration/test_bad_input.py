"""Bad input on the command line: exit code 2, one clear line, nothing started and nothing written."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from driftgym.cli import app, main

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"


def driftgym(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "driftgym.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def config_file(folder: Path, **changes: Any) -> Path:
    data: dict[str, Any] = {
        "model": {"path": str(MODEL), "init": "random"},
        "env": {"id": "driftgym/Lookup-v0"},
        "sandbox": {"kind": "process"},
        "agent": {"max_context_tokens": 256},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "run.yaml", "trainer.max_step=3"], "run.yaml: trainer.max_step: unknown key; did you mean"),
        (["train", "run.yaml", "trainer.max_steps=many"], "run.yaml: trainer.max_steps: "),
        (["train", "run.yaml", "trainer.max_steps"], "write it as key.path=value"),
        (["train", "absent.yaml"], "absent.yaml: cannot be read"),
        (["train"], "give either a CONFIG file or --resume RUN"),
        (["train", "--resume", "absent"], "not the folder of a run"),
        (["train", "trainer.max_steps=3", "--resume", "absent"], "--resume takes no CONFIG and no overrides"),
        (["env", "check", "driftgym/Lookup-v0", "levle=two_calls"], "levle"),
        (
            ["train", "run.yaml", "env={id: driftgym/Process-v0, kwargs: {env_id: CartPole-v1}}", "warmup.num_steps=1"],
            "driftgym/Process-v0 has no oracle",
        ),
        (["train", "run.yaml", "model.path=absent"], "absent: no such folder"),
        (["train", "run.yaml", "env.id=driftgym/Lokup-v0"], "did you mean 'driftgym/Lookup-v0'"),
        (["train", "run.yaml", "env.kwargs={levle: 2}"], "levle"),
        pytest.param(["train", "run.yaml", "agent.renderer=nonsense"], "nonsense", marks=pytest.mark.slow),
        (["train", "run.yaml", "run_dir=file/run"], "file is not a folder"),
        (["env", "check", "driftgym/Lokup-v0"], "did you mean 'driftgym/Lookup-v0'"),
        (["serve", "absent"], "absent"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], told: str) -> None:
    config_file(tmp_path)
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    finished = driftgym(*arguments, cwd=tmp_path)
    assert finished.returncode == 2, finished.stderr
    assert told in finished.stderr
    assert finished.stdout == ""
    assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"a: [1, 2\n", b"\xff\xfe", b""])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    finished = driftgym("train", "run.yaml", cwd=tmp_path)
    assert finished.returncode == 2
    assert len(finished.stderr.strip().splitlines()) == 1
    assert "run.yaml: " in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["train"], ["serve"], ["env", "list"], ["env", "check"], *(["sandbox", c] for c in ("build", "list", "reap"))],
)
def test_every_command_has_help_and_those_that_work_an_example(arguments: list[str]) -> None:
    finished = CliRunner().invoke(app, [*arguments, "--help"])
    assert finished.exit_code == 0
    assert not arguments or "Example: driftgym" in finished.stdout


def test_version_and_the_list_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in ((["--version"], "driftgym "), (["env", "list"], "driftgym/Lookup-v0")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert told in capsys.readouterr().out
