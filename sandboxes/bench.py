"""What a box costs on this machine, beside what the engine itself takes: the figures of `driftgym sandbox bench`.

Everything is measured on Docker, in one run. The rates, of boxes from the pool and of the engine's own bare
containers, are taken turn by turn, since other work on the machine moves both.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import PoolConfig, Sandbox, SandboxSpec
from driftgym.sandboxes.bench_figures import BenchFigures, BoxLatencies, Latency, Rates
from driftgym.sandboxes.docker_provider import DockerProvider
from driftgym.sandboxes.docker_settings import container_settings
from driftgym.sandboxes.images import prepare_image
from driftgym.sandboxes.pool import SandboxPool
from driftgym.sandboxes.reaper import labels_of
from driftgym.sandboxes.toolbox_sandbox import ToolboxSandbox

OnProgress = Callable[[str, float], None]
"""Takes what is being measured, and the share of the whole that is behind, 0 to 1."""
CONCURRENCY = 16
_CONNECT_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 30.0
_RUN_ID = "bench"
_LINE_SERVER = ("sh", "-c", 'while read -r line; do echo "$line"; done')
_IDLE_PROGRAM = ("sleep", "3600")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """How often each thing is done.

    >>> QUICK.num_turns < FULL.num_turns
    True
    """

    num_execs: int
    """Commands through the toolbox, as argv and as shell line each, and lines asked."""
    num_engine_execs: int
    """Commands through the engine, as argv and as shell line each."""
    num_resets: int
    """Resets of one box."""
    num_starts: int
    """Boxes started one after the other."""
    num_acquires: int
    """Boxes taken from a pool that has one ready."""
    num_turns: int
    """Turns of the pool, and of the engine beside it."""
    boxes_per_turn: int
    """Boxes, or containers, in each."""


FULL = BenchPlan(
    num_execs=1000, num_engine_execs=60, num_resets=100, num_starts=12, num_acquires=200, num_turns=4, boxes_per_turn=48
)
"""Two minutes."""
QUICK = BenchPlan(
    num_execs=200, num_engine_execs=15, num_resets=20, num_starts=4, num_acquires=40, num_turns=2, boxes_per_turn=32
)
"""Half a minute."""


async def measure(spec: SandboxSpec, *, plan: BenchPlan, on_progress: OnProgress) -> BenchFigures:
    """Measures boxes of `spec` on this machine's engine; leaves none.

    Args:
        spec: the boxes' image, runtime and limits; which toolbox is chosen here.
        plan: how often each thing is done.
        on_progress: see `OnProgress`.

    Raises:
        ConfigError: the engine does not have the image.
        SandboxError: no engine answers, or a box fails.
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    async with _provider() as provider:
        image = await prepare_image(provider.engine, spec, say=lambda text: None, may_build=False)
        on_progress("starts", 0.0)
        cold_start = await _measure_starts(provider, spec, plan)
        on_progress("calls through the toolbox", 0.1)
        toolbox = await _measure_toolbox(provider, spec, plan)
        on_progress("calls through the engine", 0.2)
        through_engine = spec.model_copy(update={"toolbox": "engine"})
        async with _box(provider, through_engine) as box:
            engine = await _measure_calls(box, num_execs=plan.num_engine_execs, ask=None, reset=None)
    on_progress("the warm pool", 0.3)
    warm_acquire = await _measure_acquires(spec, plan)
    rates = await _measure_rates(spec, image, plan, on_progress=on_progress)
    return BenchFigures(
        image=image,
        runtime=spec.runtime,
        num_cores=os.cpu_count() or 1,
        load_1min=round(load, 1),
        wall_s=round(time.monotonic() - began, 1),
        toolbox=toolbox,
        engine=engine,
        cold_start=cold_start,
        warm_acquire=warm_acquire,
        rates=rates,
    )


@contextlib.asynccontextmanager
async def _provider() -> AsyncIterator[DockerProvider]:
    provider = await DockerProvider.open(timeout_s=_CONNECT_TIMEOUT_S, run_id=_RUN_ID)
    try:
        yield provider
    finally:
        await provider.close()


@contextlib.asynccontextmanager
async def _box(provider: DockerProvider, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    box = await provider.start(spec, timeout_s=_START_TIMEOUT_S)
    try:
        yield box
    finally:
        await box.close()


async def _timed(work: Awaitable[object]) -> float:
    """How long `work` took, in seconds."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def _measure_starts(provider: DockerProvider, spec: SandboxSpec, plan: BenchPlan) -> Latency:
    durations_s = []
    for _ in range(plan.num_starts):
        began = time.perf_counter()
        async with _box(provider, spec):
            durations_s.append(time.perf_counter() - began)
    return Latency.of(durations_s)


async def _measure_toolbox(provider: DockerProvider, spec: SandboxSpec, plan: BenchPlan) -> BoxLatencies | None:
    async with _box(provider, spec) as box:
        if not isinstance(box, ToolboxSandbox):
            return None
        process = await box.spawn(_LINE_SERVER)
        asks_s = [await _timed(process.ask("x", timeout_s=_CALL_TIMEOUT_S)) for _ in range(plan.num_execs)]
        await process.kill()
        resets_s = []
        for _ in range(plan.num_resets):
            await _check_true(box, "echo x >file; sleep 1000 & true")
            resets_s.append(await _timed(box.reset()))
        return await _measure_calls(box, num_execs=plan.num_execs, ask=Latency.of(asks_s), reset=Latency.of(resets_s))


async def _measure_calls(box: Sandbox, *, num_execs: int, ask: Latency | None, reset: Latency | None) -> BoxLatencies:
    await _check_true(box, "true")
    argvs_s, lines_s = [], []
    for _ in range(num_execs):
        argvs_s.append(await _timed(box.exec(["true"], timeout_s=_CALL_TIMEOUT_S)))
        lines_s.append(await _timed(box.exec("true", timeout_s=_CALL_TIMEOUT_S)))
    return BoxLatencies(exec_argv=Latency.of(argvs_s), exec_shell=Latency.of(lines_s), ask=ask, reset=reset)


async def _check_true(box: Sandbox, command: str) -> None:
    """Raises SandboxError when `command` fails: figures of calls that do nothing would please."""
    result = await box.exec(command, timeout_s=_CALL_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"`{command}` fails in the box ({result.exit_code}): {result.stderr.strip()[:200]}")


async def _measure_acquires(spec: SandboxSpec, plan: BenchPlan) -> Latency:
    config = PoolConfig(num_warm=2, max_boxes=8)
    durations_s = []
    async with SandboxPool(await _open_provider(), config) as pool:
        await (await pool.start(spec, timeout_s=_START_TIMEOUT_S)).close()
        for _ in range(plan.num_acquires):
            await _until_warm(pool, config.num_warm)
            began = time.perf_counter()
            box = await pool.start(spec, timeout_s=_START_TIMEOUT_S)
            durations_s.append(time.perf_counter() - began)
            await _check_true(box, "true")
            await box.close()
    return Latency.of(durations_s)


async def _open_provider() -> DockerProvider:
    return await DockerProvider.open(timeout_s=_CONNECT_TIMEOUT_S, run_id=_RUN_ID)


async def _until_warm(pool: SandboxPool, num_warm: int) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S):
        while pool.stats.num_warm < num_warm:  # noqa: ASYNC110  (the pool tells nobody when a box is ready)
            await asyncio.sleep(0.005)


async def _measure_rates(spec: SandboxSpec, image: str, plan: BenchPlan, *, on_progress: OnProgress) -> Rates:
    pool_per_s, engine_per_s = [], []
    for turn in range(plan.num_turns):
        on_progress("boxes per second", 0.4 + 0.6 * turn / plan.num_turns)
        # Each goes first half of the time: what one leaves to the engine is paid by the other.
        order = (_pool_rate, _engine_rate) if turn % 2 == 0 else (_engine_rate, _pool_rate)
        rates = {rate_of: await rate_of(spec, image, plan.boxes_per_turn) for rate_of in order}
        pool_per_s.append(round(rates[_pool_rate], 3))
        engine_per_s.append(round(rates[_engine_rate], 3))
    return Rates(
        concurrency=CONCURRENCY,
        boxes_per_turn=plan.boxes_per_turn,
        pool_per_s=tuple(pool_per_s),
        engine_per_s=tuple(engine_per_s),
    )


async def _pool_rate(spec: SandboxSpec, image: str, num_boxes: int) -> float:
    """Boxes per second, each taken, once it answers, and given back by one of `CONCURRENCY` episodes at once."""
    config = PoolConfig(reuse="fresh", num_warm=0, max_boxes=4 * CONCURRENCY)
    provider = await _open_provider()
    began = time.perf_counter()
    async with SandboxPool(provider, config) as pool:

        async def play() -> None:
            await (await pool.start(spec, timeout_s=_START_TIMEOUT_S)).close()

        await _all_at_once(play, num_boxes)
    return num_boxes / (time.perf_counter() - began)


async def _engine_rate(spec: SandboxSpec, image: str, num_boxes: int) -> float:
    """Bare containers per second."""
    async with _provider() as provider:
        engine = provider.engine
        info = await engine.image(image)
        volumes = info.volumes if info is not None else ()
        labels = labels_of(spec, run_id=_RUN_ID)
        body = container_settings(spec, image=image, command=_IDLE_PROGRAM, labels=labels, volumes=volumes)

        async def live() -> None:
            made = await engine.request("POST", "/containers/create", body=body, timeout_s=_START_TIMEOUT_S)
            container_id = made.value["Id"]
            try:
                await engine.request("POST", f"/containers/{container_id}/start", timeout_s=_START_TIMEOUT_S)
            finally:
                await engine.remove(container_id)

        began = time.perf_counter()
        await _all_at_once(live, num_boxes)
        return num_boxes / (time.perf_counter() - began)


async def _all_at_once(work: Callable[[], Awaitable[None]], num_times: int) -> None:
    """Does `work` so many times, `CONCURRENCY` at once. The first error cancels the others."""
    left = iter(range(num_times))

    async def go_on() -> None:
        for _ in left:
            await work()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(go_on())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
