"""A real vLLM server on the CPU, for tests of the client.

Its Python is named by DRIFTGYM_VLLM_PYTHON, or is that of `.vllm-venv`, which `tests/vllm_server/README.md` makes.
Where there is none, tests are skipped, and fail where DRIFTGYM_REQUIRE names `vllm`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from engine_server import ROOT, EngineServer, engine_python, open_engine_server

START_TIMEOUT_S = 400.0
MAX_RUNNING_REQUESTS = 80
SHAPE = {"head_dim": 32, "is_tied": False}
"""Of a model: vLLM's attention on the CPU takes no smaller head, and its output layer there keeps the weights that it
was started with where they are those of the embeddings."""
_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    f"--max-num-seqs={MAX_RUNNING_REQUESTS}",
)
AS_DOCUMENTED = ("--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode=processed_logprobs")
"""The flags that driftgym wants of a vLLM server."""
PLAIN = ("--logprobs-mode=processed_logprobs",)
"""It then reports the weights of no token, and wants a tokenizer."""
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes half a minute of the first request
    "HF_HUB_OFFLINE": "1",
}


def vllm_python() -> Path:
    """The Python that has vLLM; skips the test, or fails it, where there is none."""
    return engine_python("vllm", how="see tests/vllm_server/README.md")


def open_vllm(
    model_folder: Path, *, log: Path, flags: Sequence[str] = AS_DOCUMENTED
) -> AbstractContextManager[EngineServer]:
    """A server on the model in `model_folder`; its weights have no version until it is given some.

    Args:
        model_folder: config and weights.
        log: the file that takes what it writes.
        flags: those that matter to driftgym.
    """
    launch = ROOT / "tests" / "vllm_server" / "launch.py"
    command = [vllm_python(), launch, f"--model={model_folder}", *_FLAGS, *flags]
    return open_engine_server(command, log=log, variables=_VARIABLES, timeout_s=START_TIMEOUT_S)
