"""Starts the generators of a run, all with the weights that it begins with, and makes a pool of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from driftgym.agents.generators.base import Generator
from driftgym.agents.generators.launch import start_embedded
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.agents.generators.probe import check_logprobs
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.agents.generators.turns import TurnTakingPool
from driftgym.agents.generators.vllm import VLLMGenerator
from driftgym.errors import GeneratorError
from driftgym.trainer.colocated_client import ColocatedTrainingClient
from driftgym.trainer.starting import Closer, StartRequest
from driftgym.trainer.training_client import ProcessTrainingClient
from driftgym.types import WeightUpdate

_NO_VERSION = -1
_PARKED_IDLE_S = 0.1  # a step may be waiting for an answer that is parked: generators do not stand still for long


async def start_engines(
    request: StartRequest, update: WeightUpdate, closer: Closer, *, client: ProcessTrainingClient, probe_id: int
) -> GeneratorPool:
    """The generators of the run, all with the weights of `update`; `closer` closes them.

    Args:
        request: what the life starts from.
        update: the first publication of this life.
        closer: takes the pool.
        client: the learner; one that is colocated generates itself.
        probe_id: a token that any model knows.

    Raises:
        DriftgymError: they do not start, do not take the weights, or report log-probs that cannot be trained on.
    """
    if isinstance(client, ColocatedTrainingClient):
        return await _serve_in_learner(request, update, closer, client)
    if request.config.generator.kind == "embedded":
        return await _start_servers(request, update, closer)
    return await _join_servers(request, update, closer, probe_id=probe_id)


async def _serve_in_learner(
    request: StartRequest, update: WeightUpdate, closer: Closer, client: ColocatedTrainingClient
) -> GeneratorPool:
    """The learner's own engine. Nothing is started in its place: it is lost with the learner alone."""
    config = request.config
    url = await client.serve(config.generator)
    # What waits does so in the pool, where its clock stands still during a step, and not in the engine.
    max_concurrency = min(config.generator.max_concurrency, config.generator.max_batch_size)
    generator = SGLangGenerator(url, incarnation=update.incarnation, max_concurrency=max_concurrency)
    pool = TurnTakingPool(
        [generator],
        policy_version=update.policy_version,
        came_with=update,
        # Answers whole: the engine drains before each step, and an answer in slices would be asked for again after it.
        **(_pool_settings(request) | {"chunk_tokens": None, "max_concurrency": max_concurrency}),
    )
    client.takes_turns_with(pool)
    closer.add("the generators", pool.close)
    return pool


async def _start_servers(request: StartRequest, update: WeightUpdate, closer: Closer) -> GeneratorPool:
    """Embedded servers. One that is lost is replaced by another, which begins with the newest full weights."""
    config, timeout_s = request.config, request.config.limits.weight_update_s

    async def start(weights: WeightUpdate) -> Generator:
        return await start_embedded(
            Path(weights.location),
            config.generator,
            incarnation=weights.incarnation,
            policy_version=weights.policy_version,
            dtype=config.model.dtype,
            timeout_s=timeout_s,
            close_timeout_s=config.limits.close_s,
        )

    async def start_another() -> Generator:
        weights = pool.latest_full or update
        try:
            return await start(weights)
        except GeneratorError:
            # Where newer ones were published meanwhile, these may have been removed while they were read.
            if pool.latest_full in (None, weights):
                raise
            return await start_another()

    pool = _pool_of(
        await _start_all(lambda: start(update), num=config.generator.num_servers),
        request,
        policy_version=update.policy_version,
        came_with=update,
        restart=start_another,
        restart_timeout_s=timeout_s,
    )
    closer.add("the generators", pool.close)
    return pool


async def _join_servers(request: StartRequest, update: WeightUpdate, closer: Closer, *, probe_id: int) -> GeneratorPool:
    """Servers that somebody else started: all are given the weights, and asked what their log-probs are of."""
    config = request.config
    max_concurrency = config.generator.max_concurrency
    client = VLLMGenerator if config.generator.kind == "vllm" else SGLangGenerator
    servers = [
        client(url, incarnation=update.incarnation, max_concurrency=max_concurrency) for url in config.generator.urls
    ]
    # They have any weights: none that this run published.
    pool = _pool_of(servers, request, policy_version=_NO_VERSION)
    closer.add("the generators", pool.close)
    # With keep_kv, so that a server that cannot keep its cache says so now; of weights that no run published it keeps
    # none.
    await pool.update_weights(
        update, mode="in_flight", keep_kv=config.generator.keep_kv, timeout_s=config.limits.weight_update_s
    )
    for server in servers:
        timeout_s = config.limits.generation_s
        if not await check_logprobs(server, name=server.url, token_id=probe_id, timeout_s=timeout_s):
            request.say(
                f"{server.url} does not score tokens, so that nobody can tell whether its log-probs are of after the "
                "temperature: look at ratio_mean_at_lag0, which is 1 where they are"
            )
    return pool


def _pool_of(
    generators: Sequence[Generator], request: StartRequest, *, policy_version: int, **options: Any
) -> GeneratorPool:
    return GeneratorPool(generators, policy_version=policy_version, **(_pool_settings(request) | options))


def _pool_settings(request: StartRequest) -> dict[str, Any]:
    config = request.config.generator

    def tell(event: str, text: str) -> None:
        request.say(text)
        request.count(event)

    return {
        "chunk_tokens": config.chunk_tokens,
        "iteration_tokens": config.iteration_tokens,
        "max_concurrency": config.max_concurrency,
        "max_paused_share": config.max_paused_share,
        "idle_s": _PARKED_IDLE_S,
        "on_event": tell,
    }


async def _start_all(start: Callable[[], Awaitable[Generator]], *, num: int) -> list[Generator]:
    """`num` generators, or none: when one does not start, those that did are closed."""
    started: list[Generator] = []
    try:
        for _ in range(num):
            started.append(await start())
    except BaseException:
        for generator in started:
            await asyncio.shield(generator.close())
        raise
    return started
