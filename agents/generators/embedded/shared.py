"""An engine on a model that somebody else in this process trains: both compute on the same parameters, in turn.

While the trainer has its turn the engine is held: what ran has ended, and requests wait. Once the weights are others it
also waits to be told their name, so that every token carries the version that wrote it.
"""

from typing import Any

from driftgym.agents.generators.embedded.engine import Engine
from driftgym.agents.generators.embedded.loop import EngineLoop
from driftgym.agents.generators.embedded.model import ModelRunner
from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import ModelWeights, NewWeights, WeightsRefusedError


class SharedWeights(ModelWeights):
    """The names of weights that change where they are. Nothing is read, and nothing is kept."""

    def __init__(self, model: Any, *, version: str) -> None:
        """`version` names the weights that the model has."""
        super().__init__(model, version=version)
        self._in_memory = version

    @property
    def kinds(self) -> list[str]:
        """None is read from a folder."""
        return []

    @property
    def transports(self) -> list[str]:
        """See ModelWeights."""
        return ["tensor"]

    @property
    def is_named(self) -> bool:
        """False from a change of the weights until they are taken by their name."""
        return self.version == self._in_memory

    def changed(self, version: str) -> None:
        """The memory holds other weights now, whose name will be `version`."""
        self._in_memory = version

    def name(self, version: str) -> None:
        """Tokens sampled from now on are of `version`.

        Raises:
            WeightsRefusedError: the memory holds other weights.
        """
        if version != self._in_memory:
            raise WeightsRefusedError(f"weights {version} were asked for, the memory holds {self._in_memory}")
        if version != self.version:
            self._versions.append(version)
            self._base_version = version

    def check(self, order: WeightsOrder) -> None:
        """Refuses them: see `read`."""
        self.read(order)

    def read(self, order: WeightsOrder) -> NewWeights:
        """Raises WeightsRefusedError: they would be written over what is being trained."""
        raise WeightsRefusedError(f"{order.folder}: not read: the weights are those that are trained in this process")


class SharedEngine(Engine):
    """Decodes with a model that is trained in this process. Not thread-safe."""

    weights: SharedWeights

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_batch_size: int,
        max_context_tokens: int,
        weight_version: str,
        max_prefill_tokens: int = 8192,
    ) -> None:
        """See Engine."""
        super().__init__(
            runner,
            max_batch_size=max_batch_size,
            max_context_tokens=max_context_tokens,
            weight_version=weight_version,
            max_prefill_tokens=max_prefill_tokens,
            weights=SharedWeights(runner.model, version=weight_version),
        )
        self.is_held = False

    @property
    def has_work(self) -> bool:
        """See Engine: not while it is held, nor with weights that have no name yet."""
        return not self.is_held and self.weights.is_named and super().has_work

    def hold(self) -> None:
        """Does nothing from now on; no request may be running."""
        assert self.num_running == 0
        self.is_held = True

    def let_go(self) -> None:
        """Goes on after `hold`; nothing happens when it was not held."""
        self.is_held = False

    def weights_changed(self, version: str) -> None:
        """The weights are now those that will be named `version`, while the engine is held: no KV is theirs."""
        assert self.is_held
        self.weights.changed(version)
        self._slots.drop_kv()

    def name_weights(self, version: str) -> None:
        """See SharedWeights.name."""
        self.weights.name(version)


class SharedEngineLoop(EngineLoop):
    """Runs a `SharedEngine`, and gives others their turn."""

    def __init__(self, engine: SharedEngine) -> None:
        super().__init__(engine)
        self._shared = engine

    async def hold(self) -> None:
        """Returns when what runs has ended, and nothing is computed any more; new requests wait, HTTP is answered."""
        async with self._updating:
            self.engine.accepts_waiting = False
            try:
                while self.engine.num_running:
                    self._none_running.clear()
                    await self._none_running.wait()
                self._shared.hold()
            finally:
                self.engine.accepts_waiting = True
                self._wake.set()

    async def weights_changed(self, version: str) -> None:
        """As `SharedEngine.weights_changed`."""
        self._shared.weights_changed(version)

    async def let_go(self) -> None:
        """As `SharedEngine.let_go`."""
        self._shared.let_go()
        self._wake.set()

    async def name_weights(self, version: str) -> None:
        """As `SharedEngine.name_weights`."""
        self._shared.name_weights(version)
        self._wake.set()
