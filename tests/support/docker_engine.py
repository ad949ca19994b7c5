"""The Docker engine of tests that need one: skipped where there is none, failed where DRIFTGYM_REQUIRE names docker."""

import os

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.images import BASE_IMAGE


async def open_docker() -> DockerProvider:
    """A provider of Docker boxes; skips, or fails where DRIFTGYM_REQUIRE names docker, when there is none."""
    try:
        provider = await DockerProvider.open(timeout_s=10.0)
    except SandboxError as error:
        reason = str(error)
    else:
        if await provider.engine.has_image(BASE_IMAGE):
            return provider
        await provider.close()
        reason = f"the image {BASE_IMAGE} is missing (make sandbox-engine)"
    if "docker" in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
        pytest.fail(f"DRIFTGYM_REQUIRE names docker: {reason}")
    pytest.skip(reason)
