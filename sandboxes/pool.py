"""`SandboxPool`: boxes that are ready when they are asked for, and come back into service."""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from driftgym.errors import ConfigError
from driftgym.sandboxes.base import PoolConfig, SandboxInfo, SandboxProvider, SandboxSpec
from driftgym.sandboxes.pool_box import LeaseTerms, PooledSandbox, Reuse
from driftgym.sandboxes.pool_state import PoolStats
from driftgym.sandboxes.pool_stock import Stock

_MAX_CONCURRENT_STARTS = 8
"""More at once make each slower, and none sooner, on an engine of few cores."""


def reuse_of(spec: SandboxSpec, config: PoolConfig) -> Reuse:
    """How a box of `spec` becomes clean.

    Raises:
        ConfigError: it is to be reset, and cannot be.

    >>> reuse_of(SandboxSpec(), PoolConfig()), reuse_of(SandboxSpec(read_only_root=False), PoolConfig())
    ('reset', 'fresh')
    >>> reuse_of(SandboxSpec(runtime="runsc"), PoolConfig())
    'fresh'
    """
    hindrance = None
    if not spec.read_only_root:
        hindrance = "read_only_root false (what was written to the root file system cannot be taken back)"
    elif spec.run_as_root:
        hindrance = "run_as_root (commands could have changed what cleans and verifies the box)"
    if config.reuse == "reset" and hindrance:
        raise ConfigError(f"sandbox.pool.reuse: reset does not go with sandbox.spec.{hindrance}; take fresh or auto")
    if config.reuse == "fresh" or hindrance or (config.reuse == "auto" and spec.runtime is not None):
        return "fresh"
    return "reset"


def check_pool(spec: SandboxSpec, config: PoolConfig, *, num_boxes: int = 1) -> None:
    """Raises ConfigError when a pool cannot have `num_boxes` boxes of `spec` in use at once.

    >>> check_pool(SandboxSpec(), PoolConfig(max_boxes=8), num_boxes=8)
    """
    reuse_of(spec, config)
    if num_boxes > config.max_boxes:
        raise ConfigError(f"sandbox.pool.max_boxes: {config.max_boxes} is below the {num_boxes} boxes in use at once")
    if config.max_memory_bytes is not None and num_boxes * spec.memory_bytes > config.max_memory_bytes:
        raise ConfigError(
            f"sandbox.pool.max_memory_bytes: {config.max_memory_bytes} is below what {num_boxes} boxes in use at once "
            f"may take by sandbox.spec.memory_bytes, {num_boxes * spec.memory_bytes}"
        )


class SandboxPool:
    """A `SandboxProvider` over another one, which it owns: `start` hands out boxes that are kept ready.

    A box comes back into service in one of two ways, `PoolConfig.reuse`:

    - `reset`: its processes are killed, every place where files can be written is emptied, and both is verified, in
      milliseconds. For training, where thousands of episodes of the same kind follow each other. It needs a read-only
      root and commands that are not root's, so that all places that can be written are known and what cleans them is
      out of the agent's reach; `auto` takes it then, unless the spec names a runtime: a kernel of the box's own may
      keep what nothing can verify (gVisor's keeps ports of connections that have ended).
    - `fresh`: each episode gets a new box, started ahead of it, and the old one is removed. It costs the engine a start
      and a removal per episode. For the evaluation of agents that are not trusted, where nothing that an earlier
      one may have found should be left; and where a reset cannot be, or not be verified, which is where `auto` takes
      it.

    A box is asked for a sign of life before it is handed out, and one that is dead is replaced. One into which a call
    failed is never handed out again. Requests are served in their order. The bounds on the number of boxes and on
    their memory hold over all specs, and count what is being started and removed; boxes that are ready are removed for
    a request of another spec. A box that is neither reset nor given back within `lease_s` is taken back.
    """

    def __init__(
        self, provider: SandboxProvider, config: PoolConfig, *, max_concurrent_starts: int = _MAX_CONCURRENT_STARTS
    ) -> None:
        """Nothing is started yet.

        Args:
            provider: where the boxes come from; closed with the pool.
            config: how many are kept ready, the bounds, and how they become clean.
            max_concurrent_starts: so many start at once, at most.
        """
        self._provider = provider
        self._config = config
        self._stock = Stock(provider, config, max_concurrent_starts=max_concurrent_starts)
        self._leases: set[PooledSandbox] = set()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "SandboxPool":
        """The pool itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        await self.close()

    @property
    def kind(self) -> str:
        """The provider's."""
        return self._provider.kind

    @property
    def provider(self) -> SandboxProvider:
        """Where the boxes come from."""
        return self._provider

    @property
    def stats(self) -> PoolStats:
        """What the pool has at this moment, and has done so far."""
        return self._stock.stats

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> PooledSandbox:
        """A box on lease, clean and alive.

        Waits for earlier requests, for room, and for a start if none is ready, `timeout_s` at most; so long may each
        later reset of a `fresh` box wait too.

        Raises:
            ConfigError: such a box is to be reset, and cannot be.
            SandboxError: none became free in `timeout_s`, its start failed, or the pool is closed.
        """
        reuse = reuse_of(spec, self._config)
        slot = await self._stock.take(spec, timeout_s=timeout_s)
        terms = LeaseTerms(spec=spec, reuse=reuse, timeout_s=timeout_s, lease_s=self._config.lease_s)
        lease = PooledSandbox(stock=self._stock, slot=slot, terms=terms, on_end=self._leases.discard)
        self._leases.add(lease)
        return lease

    async def list(self) -> Sequence[SandboxInfo]:
        """Every box that the provider lists: those that are ready too. Raises SandboxError."""
        return await self._provider.list()

    async def remove(self, sandbox_id: str) -> None:
        """Removes a box by force; its lease ends. Raises SandboxError when the engine is gone."""
        for lease in list(self._leases):
            if lease.sandbox_id == sandbox_id:
                lease.end("it was removed", is_sound=False)
        await self._provider.remove(sandbox_id)

    async def close(self) -> None:
        """Ends every lease, refuses who waits, removes every box, and closes the provider.

        Safe to call twice; goes on when its caller is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for lease in list(self._leases):
            lease.end("the pool of boxes is closed", is_sound=False)
        try:
            await self._stock.close()
        finally:
            await self._provider.close()
