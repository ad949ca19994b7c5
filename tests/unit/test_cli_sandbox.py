"""The commands of `driftgym sandbox` where no engine answers, and on bad input: one line, and an exit code."""

import contextlib
import http.server
import json
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from driftgym.cli import main
from driftgym.sandboxes.owners import own_host
from driftgym.sandboxes.reaper import OWNER_LABEL

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


class StubbornEngine(http.server.BaseHTTPRequestHandler):
    """An engine that has a box of a dead owner, and cannot remove it."""

    owner = ""

    def address_string(self) -> str:
        """A unix socket has none."""
        return "test"

    def log_message(self, format: str, *words: object) -> None:
        """Says nothing."""

    def answer(self, value: object, *, status: int = 200) -> None:
        """Answers with JSON."""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self) -> None:
        """The version, or the list of boxes."""
        box = {"Id": "1f" * 32, "State": "running", "Created": 0, "Labels": {OWNER_LABEL: self.owner}}
        self.answer({"ApiVersion": "1.41"} if "version" in self.path else [box])

    def do_DELETE(self) -> None:
        """Refuses."""
        self.answer({"message": "device or resource busy"}, status=500)


class EmptyEngine(StubbornEngine):
    """An engine without boxes."""

    def do_GET(self) -> None:
        """The version, or an empty list."""
        self.answer({"ApiVersion": "1.41"} if "version" in self.path else [])


@contextlib.contextmanager
def serving(
    engine: type[http.server.BaseHTTPRequestHandler], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """DOCKER_HOST names `engine` within the block."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socketserver.ThreadingUnixStreamServer(str(path), engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("words", "out"), [([], ""), (["--json"], '{"boxes": []}\n')])
def test_no_boxes_are_told_on_standard_error(
    words: list[str], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(EmptyEngine, tmp_path / "engine.sock", monkeypatch):
        assert run("list", *words) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (out, "no boxes of driftgym's on this Docker engine\n")


def test_a_box_that_cannot_be_removed_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    engine = type("Engine", (StubbornEngine,), {"owner": f"{own_host()}:{dead.pid}:1"})
    with serving(engine, tmp_path / "engine.sock", monkeypatch):
        assert run("reap", "--json") == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["num_removed"], told["num_left"]) == (0, 1)
    assert "1 are still there (1f1f1f1f1f1f): try again" in printed.err


def test_an_engine_that_is_not_on_a_socket_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    assert run("list") == 1
    assert "DOCKER_HOST=tcp://127.0.0.1:2375" in capsys.readouterr().err
