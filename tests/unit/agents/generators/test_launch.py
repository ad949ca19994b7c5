"""Embedded servers as child processes: they start, they die, and they end with their parent."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pydantic
import pytest

from driftgym.agents.generators.launch import EmbeddedServer, GeneratorConfig, start_embedded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.errors import GeneratorError
from driftgym.types import SamplingParams

CONFIG = GeneratorConfig(max_batch_size=8, max_context_tokens=256)
START_S = 90.0


def ask(generator, *, max_tokens=4, request_id="r", timeout_s=60.0):
    return generator.generate(
        [1, 2, 3],
        SamplingParams(max_tokens=max_tokens),
        request_id=request_id,
        session_id="s",
        deadline_s=time.monotonic() + timeout_s,
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until_ended(pid, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while is_running(pid):  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_server_that_stands_still_ends_the_request_at_its_deadline(model_of, save_model):
    """And answers again once it goes on; one that does not is killed by `close`."""
    folder = save_model(model_of("qwen3"), "tiny")
    server = await EmbeddedServer.start(folder, CONFIG, incarnation=2, policy_version=5, timeout_s=START_S)
    async with SGLangGenerator(server.url, incarnation=2, max_concurrency=64, server=server, close_timeout_s=1) as one:
        await ask(one)
        os.kill(server.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(GeneratorError, match="no answer by its deadline"):
            await ask(one, request_id="late", timeout_s=1.0)
        assert time.monotonic() - started >= 1.0
        os.kill(server.pid, signal.SIGCONT)
        assert len((await ask(one, request_id="again")).token_ids) == 4
        os.kill(server.pid, signal.SIGSTOP)
    await until_ended(server.pid)


@pytest.mark.slow
async def test_a_server_killed_in_the_middle_of_a_request(model_of, save_model):
    """Its requests fail at once, and a pool goes on with a new one."""
    folder = save_model(model_of("qwen3"), "tiny")
    servers = []

    async def start():
        server = await EmbeddedServer.start(folder, CONFIG, incarnation=2, policy_version=5, timeout_s=START_S)
        servers.append(server)
        return SGLangGenerator(server.url, incarnation=2, max_concurrency=64, server=server)

    first = await start()
    assert servers[0].is_alive
    assert (await first.health()).version.policy_version == 5
    async with SGLangGenerator(servers[0].url, incarnation=2, max_concurrency=1) as somebody_else:
        await somebody_else.pause()
    alone = asyncio.create_task(ask(first))
    await asyncio.sleep(0.2)
    pool = GeneratorPool([first], policy_version=5, restart=start, restart_timeout_s=START_S)
    pooled = asyncio.create_task(ask(pool, request_id="pooled", timeout_s=START_S))
    await asyncio.sleep(0.2)
    os.kill(servers[0].pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(GeneratorError):
            await alone
    completion = await pooled
    assert completion.policy_versions.tolist() == [5] * 4
    assert not servers[0].is_alive
    assert len(servers) == 2
    await pool.close()
    assert not any(is_running(server.pid) for server in servers)


@pytest.mark.slow
async def test_a_server_ends_with_its_parent(model_of, save_model):
    folder = save_model(model_of("qwen3"), "tiny")
    script = (
        "import asyncio, pathlib, sys\n"
        "from driftgym.agents.generators.launch import EmbeddedServer, GeneratorConfig\n"
        "async def main():\n"
        "    config = GeneratorConfig(max_context_tokens=256)\n"
        "    server = await EmbeddedServer.start(pathlib.Path(sys.argv[1]), config, incarnation=1, policy_version=0,"
        " timeout_s=90)\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", script, str(folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        assert is_running(pid)
    finally:
        parent.kill()
        await parent.wait()
    await until_ended(pid)


@pytest.mark.slow
async def test_a_server_that_dies_at_its_start_says_why(tmp_path):
    with pytest.raises(GeneratorError, match=r"exit code 2(.|\n)*no model here"):
        await EmbeddedServer.start(tmp_path, CONFIG, incarnation=1, policy_version=0, timeout_s=START_S)


async def test_a_server_that_is_not_ready_in_time_is_ended(model_of, save_model):
    folder = save_model(model_of("qwen3"), "tiny")
    with pytest.raises(GeneratorError, match=r"not ready within 0.2 s"):
        await EmbeddedServer.start(folder, CONFIG, incarnation=1, policy_version=0, timeout_s=0.2)


@pytest.mark.slow
async def test_a_client_of_another_life_refuses_the_server(model_of, save_model):
    folder = save_model(model_of("qwen3"), "tiny")
    generator = await start_embedded(
        folder, CONFIG, incarnation=3, policy_version=0, timeout_s=START_S, close_timeout_s=10
    )
    try:
        assert len((await ask(generator)).token_ids) == 4
        async with SGLangGenerator(generator.url, incarnation=4, max_concurrency=4) as stranger:
            with pytest.raises(GeneratorError, match="another life"):
                await ask(stranger)
    finally:
        await generator.close()


def test_urls_belong_to_sglang():
    with pytest.raises(pydantic.ValidationError, match="urls"):
        GeneratorConfig(kind="sglang")
    with pytest.raises(pydantic.ValidationError, match="urls"):
        GeneratorConfig(urls=("http://127.0.0.1:1",))
