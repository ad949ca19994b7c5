"""A real SGLang server on the CPU, for tests of the client.

Its Python is named by DRIFTGYM_SGLANG_PYTHON, or is that of `.sglang-venv`, which `make sglang-server` makes. Where
there is none, tests are skipped, and fail where DRIFTGYM_REQUIRE names `sglang`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from engine_server import ROOT, EngineServer, engine_python, open_engine_server

START_TIMEOUT_S = 240.0
MAX_RUNNING_REQUESTS = 80
_FOLDER = ROOT / "tests" / "sglang_server"
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
_VARIABLES = {
    "PYTHONPATH": str(_FOLDER / "stubs"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # with more on few cores the threads wait for each other: 20 times as slow
    "HF_HUB_OFFLINE": "1",
}


def sglang_python() -> Path:
    """The Python that has SGLang; skips the test, or fails it, where there is none."""
    return engine_python("sglang", how="make sglang-server")


def open_sglang(
    model_folder: Path, *, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AbstractContextManager[EngineServer]:
    """A server on the model in `model_folder`; its weights have no version until it is given some.

    Args:
        model_folder: config and weights.
        log: the file that takes what it writes.
        flags: further ones.
        environment: further variables.
    """
    command = [sglang_python(), _FOLDER / "launch.py", f"--model-path={model_folder}", *_FLAGS, *flags]
    variables = {**_VARIABLES, **(environment or {})}
    return open_engine_server(command, log=log, variables=variables, timeout_s=START_TIMEOUT_S)
