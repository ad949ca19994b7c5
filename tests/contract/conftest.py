"""Boxes of every kind for the contract suites."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio
from docker_engine import busybox_image, open_docker, require_gvisor
from engine_server import EngineServer
from sglang_server import open_sglang, sglang_python
from vllm_server import SHAPE, open_vllm, vllm_python

from driftgym.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.providers import ProcessProvider
from driftgym.sandboxes.scripted import ScriptedProvider

START_TIMEOUT_S = 60.0
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
ENGINE_EXEC = pytest.param("engine-exec", marks=pytest.mark.docker)
GVISOR = pytest.param("gvisor", marks=[pytest.mark.docker, pytest.mark.gvisor])
StartBox = Callable[..., Awaitable[Sandbox]]


@contextlib.asynccontextmanager
async def provider_of(kind: str) -> AsyncIterator[SandboxProvider]:
    """A provider of boxes of one kind, closed at the end."""
    provider: SandboxProvider
    if kind in ("process", "scripted"):
        provider = ProcessProvider() if kind == "process" else ScriptedProvider()
    else:
        provider = await open_docker()
    try:
        yield provider
    finally:
        await provider.close()


async def spec_of(kind: str, provider: SandboxProvider) -> SandboxSpec:
    """What a box of one kind is asked for with; skips where the engine cannot have it."""
    if kind == "engine-exec":
        assert isinstance(provider, DockerProvider)
        return SandboxSpec(image=await busybox_image(provider.engine), toolbox="engine")
    if kind == "gvisor":
        assert isinstance(provider, DockerProvider)
        await require_gvisor(provider.engine)
        return SandboxSpec(runtime="runsc")
    return SandboxSpec()


@pytest.fixture(params=["process", DOCKER, ENGINE_EXEC, GVISOR, "scripted"])
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of box."""
    return str(request.param)


@pytest_asyncio.fixture
async def provider(kind: str) -> AsyncIterator[SandboxProvider]:
    """A provider of each kind."""
    async with provider_of(kind) as provider:
        yield provider


@pytest_asyncio.fixture
async def spec(kind: str, provider: SandboxProvider) -> SandboxSpec:
    """What a box of each kind is asked for with."""
    return await spec_of(kind, provider)


@pytest_asyncio.fixture
async def box(provider: SandboxProvider, spec: SandboxSpec) -> Sandbox:
    """A box of each kind."""
    return await provider.start(spec, timeout_s=START_TIMEOUT_S)


@pytest.fixture(params=["process", DOCKER, ENGINE_EXEC, GVISOR])
def real_kind(request: pytest.FixtureRequest) -> str:
    """Every kind of box that runs real programs."""
    return str(request.param)


@pytest_asyncio.fixture
async def real_provider(real_kind: str) -> AsyncIterator[SandboxProvider]:
    """A provider of each kind whose boxes run real programs."""
    async with provider_of(real_kind) as provider:
        yield provider


@pytest_asyncio.fixture
async def real_spec(real_kind: str, real_provider: SandboxProvider) -> SandboxSpec:
    """What a box that runs real programs is asked for with."""
    return await spec_of(real_kind, real_provider)


@pytest_asyncio.fixture
async def real_box(real_provider: SandboxProvider, real_spec: SandboxSpec) -> Sandbox:
    """A box that runs real programs."""
    return await real_provider.start(real_spec, timeout_s=START_TIMEOUT_S)


@pytest_asyncio.fixture
async def docker_provider() -> AsyncIterator[DockerProvider]:
    """A provider of Docker boxes."""
    provider = await open_docker()
    try:
        yield provider
    finally:
        await provider.close()


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A real SGLang server on a tiny model, one for the whole session; it takes the weights of each test."""
    sglang_python()  # before a model is made

    from tiny_models import save_tiny_model  # torch, which the other suites here do without

    folder = tmp_path_factory.mktemp("sglang")
    with open_sglang(save_tiny_model(folder / "model", seed=0), log=folder / "log") as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A real vLLM server on a tiny model, one for the whole session; it takes the weights of each test."""
    vllm_python()  # before a model is made

    from tiny_models import save_tiny_model  # torch, which the other suites here do without

    folder = tmp_path_factory.mktemp("vllm")
    with open_vllm(save_tiny_model(folder / "model", seed=0, **SHAPE), log=folder / "log") as server:
        yield server


@pytest.fixture
def run_id() -> str:
    """A name that no other run has."""
    return f"test-{uuid.uuid4().hex}"


@pytest_asyncio.fixture
async def run_provider(docker_provider: DockerProvider, run_id: str) -> AsyncIterator[DockerProvider]:
    """A provider whose boxes carry a run of their own."""
    provider = await DockerProvider.open(timeout_s=10, run_id=run_id)
    yield provider
    await provider.close()
