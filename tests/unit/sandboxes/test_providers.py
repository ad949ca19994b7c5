"""Which boxes a run uses, and what is said about it."""

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.base import PoolConfig, SandboxConfig, SandboxSpec
from driftgym.sandboxes.providers import ProcessProvider, open_provider


async def test_process_is_taken_when_asked_for_and_said() -> None:
    said: list[str] = []
    provider = await open_provider(SandboxConfig(kind="process"), say=said.append)
    await provider.close()
    assert provider.kind == "process"
    assert "trusted code only" in said[0]


async def test_what_is_opened_is_a_pool_that_closes_what_is_below() -> None:
    config = SandboxConfig(kind="process", pool=PoolConfig(num_warm=1, max_boxes=2))
    async with await open_provider(config, say=lambda text: None) as pool:
        box = await pool.start(config.spec, timeout_s=60)
        assert (await box.exec("echo on")).stdout == "on\n"
        assert pool.stats.num_boxes <= 2
    with pytest.raises(SandboxError, match="closed"):
        await box.exec("true")
    with pytest.raises(SandboxError, match="closed"):
        await pool.provider.start(config.spec, timeout_s=60)


async def test_boxes_that_cannot_be_reset_are_refused_before_anything_is_opened() -> None:
    said: list[str] = []
    spec = SandboxSpec(read_only_root=False)
    with pytest.raises(ConfigError, match=r"^sandbox\.pool\.reuse: [^\n]*read_only_root"):
        await open_provider(SandboxConfig(spec=spec, pool=PoolConfig(reuse="reset")), say=said.append)
    pool = PoolConfig(max_memory_bytes=1)
    with pytest.raises(ConfigError, match=r"^sandbox\.pool\.max_memory_bytes: "):
        await open_provider(SandboxConfig(pool=pool), say=said.append)
    assert said == []


@pytest.mark.parametrize("name", ["image", "dockerfile", "runtime"])
def test_empty_name_is_no_default(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        SandboxSpec.model_validate({name: ""})


async def test_auto_without_an_engine_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said: list[str] = []
    provider = await open_provider(SandboxConfig(), say=said.append)
    await provider.close()
    assert provider.kind == "process"
    assert len(said) == 1
    assert "no Docker engine answers" in said[0]
    with pytest.raises(ConfigError, match=r"^sandbox\.kind: no Docker engine answers[^\n]*$"):
        await open_provider(SandboxConfig(kind="docker"), say=said.append)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("runtime", "runsc"),
        ("egress", ("pypi.org",)),
        ("image", "python:3.12"),
        ("dockerfile", "box"),
        ("base", "debian"),
        ("network", "bridge"),
        ("run_as_root", True),
    ],
)
async def test_auto_takes_no_process_for_what_only_docker_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: object
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said: list[str] = []
    spec = SandboxSpec.model_validate({name: value})
    words = (
        rf"^sandbox\.spec\.{name}: [^\n]*no Docker engine answers[^\n]*make sandbox-engine[^\n]*leave out[^\n]*{name}$"
    )
    with pytest.raises(ConfigError, match=words):
        await open_provider(SandboxConfig(spec=spec), say=said.append)
    assert said == []


async def test_auto_takes_a_process_for_what_is_merely_another_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    spec = SandboxSpec(memory_bytes=1 << 27, network="none", max_open_files=128, read_only_root=True)
    provider = await open_provider(SandboxConfig(spec=spec), say=lambda text: None)
    await provider.close()
    assert provider.kind == "process"


async def test_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "mute.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(ConfigError, match="no Docker engine answers"):
            await open_provider(SandboxConfig(kind="docker"), say=lambda text: None)


async def test_engine_elsewhere_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="unix socket"):
        await open_provider(SandboxConfig(kind="docker"), say=lambda text: None)


async def test_closed_provider_starts_nothing() -> None:
    provider = ProcessProvider()
    box = await provider.start(SandboxSpec(), timeout_s=60)
    await provider.close()
    with pytest.raises(SandboxError):
        await box.exec(["true"])
    with pytest.raises(SandboxError, match="closed"):
        await provider.start(SandboxSpec(), timeout_s=60)


async def test_start_that_is_too_slow_or_cancelled_leaves_nothing() -> None:
    provider = ProcessProvider()
    with pytest.raises(SandboxError, match="did not start"):
        await provider.start(SandboxSpec(), timeout_s=0.0001)
    task = asyncio.ensure_future(provider.start(SandboxSpec(), timeout_s=60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await provider.list() == []
    await provider.close()


async def test_boxes_start_no_threads() -> None:
    before = set(threading.enumerate())
    provider = ProcessProvider()
    await provider.start(SandboxSpec(), timeout_s=60)
    assert set(threading.enumerate()) <= before
    await provider.close()
    assert set(threading.enumerate()) <= before
