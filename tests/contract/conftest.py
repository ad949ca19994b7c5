"""Boxes of every kind for the contract suites."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from docker_engine import open_docker

from driftgym.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.providers import ProcessProvider
from driftgym.sandboxes.scripted import ScriptedProvider

START_TIMEOUT_S = 60.0
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
StartBox = Callable[..., Awaitable[Sandbox]]


@contextlib.asynccontextmanager
async def provider_of(kind: str) -> AsyncIterator[SandboxProvider]:
    """A provider of boxes of one kind, closed at the end."""
    provider: SandboxProvider
    if kind == "docker":
        provider = await open_docker()
    else:
        provider = ProcessProvider() if kind == "process" else ScriptedProvider()
    try:
        yield provider
    finally:
        await provider.close()


@pytest_asyncio.fixture(params=["process", DOCKER, "scripted"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    """A provider of each kind."""
    async with provider_of(request.param) as provider:
        yield provider


@pytest_asyncio.fixture
async def box(provider: SandboxProvider) -> Sandbox:
    """A box of each kind."""
    return await provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)


@pytest_asyncio.fixture(params=["process", DOCKER])
async def real_provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    """A provider of each kind whose boxes run real programs."""
    async with provider_of(request.param) as provider:
        yield provider


@pytest_asyncio.fixture
async def real_box(real_provider: SandboxProvider) -> Sandbox:
    """A box that runs real programs."""
    return await real_provider.start(SandboxSpec(), timeout_s=START_TIMEOUT_S)


@pytest_asyncio.fixture
async def docker_provider() -> AsyncIterator[DockerProvider]:
    """A provider of Docker boxes."""
    provider = await open_docker()
    try:
        yield provider
    finally:
        await provider.close()
