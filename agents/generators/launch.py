"""Starting generators: embedded servers as child processes, and the pool that a run uses."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Literal, Self

import pydantic

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.config import Config
from driftgym.errors import GeneratorError
from driftgym.processes import end_session, kill_session

_SERVER_MODULE = "driftgym.agents.generators.embedded.server"
_ERROR_LINES = 12
_START_CLOSE_S = 5.0


class GeneratorConfig(Config):
    """Which engines write the tokens."""

    kind: Literal["embedded", "sglang", "vllm"] = pydantic.Field(
        "embedded", description="`embedded`: servers that the run starts; `sglang`, `vllm`: servers that run at `urls`."
    )
    urls: tuple[str, ...] = pydantic.Field(
        (), description="For `sglang` and `vllm`: the servers' roots, http://host:port."
    )
    num_servers: int = pydantic.Field(1, ge=1, description="For `embedded`: how many servers to start.")
    max_batch_size: int = pydantic.Field(128, ge=1, description="Requests that one server decodes together.")
    max_context_tokens: int = pydantic.Field(1024, ge=2, description="Prompt and answer of one request, in tokens.")
    num_threads: int = pydantic.Field(1, ge=1, description="CPU threads of one embedded server.")
    device: str = pydantic.Field("cpu", description="Where an embedded server computes: cpu, cuda, cuda:1, ...")
    max_concurrency: int = pydantic.Field(1024, ge=1, description="Requests under way at one server; more wait.")
    chunk_tokens: int | None = pydantic.Field(
        256, ge=1, description="Long answers are asked for in slices; a lost server costs at most one of each."
    )
    iteration_tokens: int | None = pydantic.Field(
        None, ge=1, description="An answer that got so many tokens is parked until the next weights come."
    )
    keep_kv: bool = pydantic.Field(False, description="Updates in flight keep the KV cache instead of recomputing it.")
    max_paused_share: float = pydantic.Field(
        1.0, gt=0, le=1, description="Of the servers, at most so many take weights at once; one at least."
    )

    @pydantic.model_validator(mode="after")
    def _check_urls(self) -> Self:
        if (self.kind != "embedded") != bool(self.urls):
            raise ValueError("urls: give them exactly when kind is sglang or vllm")
        return self


class EmbeddedServer:
    """One embedded server, a child process that ends with this one. Use `start`, then `close`."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self._url = ""

    @classmethod
    async def start(
        cls,
        model_folder: Path,
        config: GeneratorConfig,
        *,
        incarnation: int,
        policy_version: int,
        timeout_s: float,
        dtype: str = "float32",
    ) -> Self:
        """Starts a server on the model in `model_folder`, whose weights are of that version, on a free port.

        It computes in `dtype`, which is that of the weights, so that the learner finds the same log-probs.

        Raises:
            GeneratorError: it died, or was not ready within `timeout_s`; with the last lines that it wrote.
        """
        version = WeightVersion(incarnation=incarnation, policy_version=policy_version)
        # A file, since nobody would read a pipe: a server that writes much to one would stand still.
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            _SERVER_MODULE,
            *_server_arguments(model_folder, config, version, dtype=dtype),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # Idle OpenMP threads that spin would take the CPU from the learner.
            env={**os.environ, "OMP_NUM_THREADS": str(config.num_threads), "OMP_WAIT_POLICY": "PASSIVE"},
            start_new_session=True,  # ctrl-C goes to the parent, which closes its children in order
        )
        server = cls(process, errors)
        try:
            await server._wait_until_ready(timeout_s)
        except BaseException:
            server.kill()
            await asyncio.shield(server.close(timeout_s=_START_CLOSE_S))
            raise
        return server

    async def _wait_until_ready(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise GeneratorError(f"the generator was not ready within {timeout_s} s\n{self._last_lines()}") from None
        try:
            self._url = str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_CLOSE_S):
                    await self._process.wait()
            raise GeneratorError(
                f"the generator ended with exit code {self._process.returncode} before it was ready\n"
                f"{self._last_lines()}"
            ) from None

    @property
    def url(self) -> str:
        """The server's root."""
        return self._url

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the server runs."""
        return self._process.returncode is None

    def _last_lines(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 8192))
        lines = self._errors.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_ERROR_LINES:])

    def kill(self) -> None:
        """Ends the server at once; nothing happens when it has ended."""
        kill_session(self._process)

    async def close(self, *, timeout_s: float) -> None:
        """Ends the server: closes its input, which it takes as the end; kills it past `timeout_s`."""
        try:
            await end_session(self._process, timeout_s=timeout_s)
        finally:
            self._errors.close()


async def start_embedded(
    model_folder: Path,
    config: GeneratorConfig,
    *,
    incarnation: int,
    policy_version: int,
    timeout_s: float,
    close_timeout_s: float,
    dtype: str = "float32",
) -> SGLangGenerator:
    """A generator on an embedded server of its own, which ends when the generator is closed, within `close_timeout_s`.

    Raises:
        GeneratorError: as `EmbeddedServer.start`.
    """
    server = await EmbeddedServer.start(
        model_folder,
        config,
        incarnation=incarnation,
        policy_version=policy_version,
        timeout_s=timeout_s,
        dtype=dtype,
    )
    return SGLangGenerator(
        server.url,
        incarnation=incarnation,
        max_concurrency=config.max_concurrency,
        server=server,
        close_timeout_s=close_timeout_s,
    )


def _server_arguments(model_folder: Path, config: GeneratorConfig, version: WeightVersion, *, dtype: str) -> list[str]:
    options = {
        "--host": "127.0.0.1",
        "--port": "0",
        "--max-batch-size": str(config.max_batch_size),
        "--max-context-tokens": str(config.max_context_tokens),
        "--num-threads": str(config.num_threads),
        "--weight-version": str(version),
        "--device": config.device,
        "--dtype": dtype,
    }
    return [str(model_folder), *(part for option in options.items() for part in option), "--exit-with-stdin"]
