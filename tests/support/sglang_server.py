"""A real SGLang server on the CPU, for tests of the client.

Its Python is named by DRIFTGYM_SGLANG_PYTHON, or is that of `.sglang-venv`, which `make sglang-server` makes. Where
there is none, tests are skipped, and fail where DRIFTGYM_REQUIRE names `sglang`.
"""

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
FOLDER = ROOT / "tests" / "sglang_server"
START_TIMEOUT_S = 240.0
MAX_RUNNING_REQUESTS = 80
_FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--skip-tokenizer-init",
    "--mem-fraction-static=0.2",
    "--max-total-tokens=60000",
    f"--max-running-requests={MAX_RUNNING_REQUESTS}",
)


class SglangServer:
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
                pytest.fail(f"the SGLang server did not start:\n{self.last_lines()}")
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def sglang_python() -> Path:
    """The Python that has SGLang; skips the test, or fails it, where there is none."""
    python = Path(os.environ.get("DRIFTGYM_SGLANG_PYTHON") or ROOT / ".sglang-venv" / "bin" / "python")
    if not python.exists():
        reason = f"no SGLang at {python}: make sglang-server, or name its Python in DRIFTGYM_SGLANG_PYTHON"
        if "sglang" in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
            pytest.fail(f"DRIFTGYM_REQUIRE names sglang: {reason}")
        pytest.skip(reason)
    return python


@contextlib.contextmanager
def open_sglang(
    model_folder: Path, *, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[SglangServer]:
    """A server on the model in `model_folder`; its weights have no version until it is given some.

    Args:
        model_folder: config and weights.
        log: the file that takes what it writes.
        flags: further ones.
        environment: further variables.
    """
    python, port = sglang_python(), _free_port()
    command = [python, FOLDER / "launch.py", f"--model-path={model_folder}", "--host=127.0.0.1", f"--port={port}"]
    variables = {
        "PYTHONPATH": str(FOLDER / "stubs"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",  # with more on few cores the threads wait for each other: 20 times as slow
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    with log.open("w+b") as output:
        process = subprocess.Popen(
            [*command, *_FLAGS, *flags],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**{key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}, **variables},
        )
        server = SglangServer(process, f"http://127.0.0.1:{port}", output)
        try:
            server.wait_until_healthy(START_TIMEOUT_S)
            yield server
        finally:
            server.kill()
            assert process.stdin is not None
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
