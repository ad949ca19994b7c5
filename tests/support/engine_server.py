"""A real server of some engine, for tests of its client: a process of its own that is started, waited for and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[2]


class EngineServer:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        self._process = process
        self.url = url
        self._log = log

    @property
    def is_alive(self) -> bool:
        """True while its first process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends all its processes at once, as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self) -> str:
        """What it wrote last."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Fails the test when it dies before, or is not ready within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            if not self.is_alive or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{self.last_lines()}")
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def engine_python(engine: str, *, how: str) -> Path:
    """The Python that has `engine`: that of DRIFTGYM_ENGINE_PYTHON, or of the environment `.ENGINE-venv`.

    Args:
        engine: in small letters, as DRIFTGYM_REQUIRE names it.
        how: it is installed. Where it is not, the test is skipped, or fails where DRIFTGYM_REQUIRE names it.
    """
    variable = f"DRIFTGYM_{engine.upper()}_PYTHON"
    python = Path(os.environ.get(variable) or ROOT / f".{engine}-venv" / "bin" / "python")
    if not python.exists():
        reason = f"no {engine} at {python}: {how}, or name its Python in {variable}"
        if engine in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
            pytest.fail(f"DRIFTGYM_REQUIRE names {engine}: {reason}")
        pytest.skip(reason)
    return python


@contextlib.contextmanager
def open_engine_server(
    command: Sequence[str | Path], *, log: Path, variables: Mapping[str, str], timeout_s: float
) -> Iterator[EngineServer]:
    """A server, ended with all its processes.

    Args:
        command: what starts it; a port that is free is added.
        log: the file that takes what it writes, in the folder that it runs in.
        variables: of its environment, besides those of this process but for what concerns Python's imports.
        timeout_s: bounds its start.
    """
    port = _free_port()
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    with log.open("w+b") as output:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1", f"--port={port}"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
            env={**inherited, **variables},
        )
        server = EngineServer(process, f"http://127.0.0.1:{port}", output)
        try:
            server.wait_until_healthy(timeout_s)
            yield server
        finally:
            server.kill()
            assert process.stdin is not None
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
