"""The commands of `driftgym sandbox` where no engine answers, and on bad input: one line, and an exit code."""

from pathlib import Path

import pytest

from driftgym.cli import main

COMMANDS = ("build", "list", "reap", "bench")


def run(*words: str) -> int:
    """The exit code of `driftgym sandbox WORDS`."""
    with pytest.raises(SystemExit) as ending:
        main(["sandbox", *words])
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.fixture
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_HOST names a socket that nobody listens on."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'nobody.sock'}")


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("no_engine")
def test_without_an_engine_there_is_one_line(
    command: str, as_json: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, *as_json) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("driftgym: ")
    assert "nobody.sock" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["build", "box", "--mirror", "http://mirror"], "--mirror is for the base image"),
        (["build", "--pull"], "--pull is for a FOLDER"),
        (["build", "one", "two"], ""),
        (["bench", "--image"], ""),
        (["list", "box"], ""),
        (["reap", "--all"], ""),
        (["no-such-command"], ""),
    ],
)
@pytest.mark.usefixtures("no_engine")
def test_bad_input_is_told_before_any_work(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    printed = capsys.readouterr().out
    assert f"Example: driftgym sandbox {command}" in printed
    assert "--json" in printed


def test_an_engine_that_is_not_on_a_socket_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    assert run("list") == 1
    assert "DOCKER_HOST=tcp://127.0.0.1:2375" in capsys.readouterr().err
