"""A pool whose engines compute where somebody else does too, in turn, and on weights that the other one changes."""

from driftgym.agents.generators.base import WeightUpdateMode
from driftgym.agents.generators.pool import GeneratorPool
from driftgym.types import WeightUpdate


class TurnTakingPool(GeneratorPool):
    """While the other one has the turn, requests wait here, and their clocks stand still.

    Nothing here bounds a turn: whoever has it gives it back by a deadline of its own, or ends together with the
    engines. Weights that changed in a turn have no name before the next update. Until then requests wait on, by their
    deadlines.
    """

    _has_turn = True
    _has_named_weights = True

    async def lend_turn(self) -> None:
        """Begins no slice any more. Waits for those under way, which end by their deadlines."""
        self._has_turn = False
        await self._parts.places.lend()

    def take_turn_back(self, *, have_weights_changed: bool) -> None:
        """Goes on, at once or with the next update; nothing happens when the turn was not lent."""
        self._has_named_weights = self._has_named_weights and not have_weights_changed
        self._has_turn = True
        self._parts.places.go_on(gives_places=self._has_named_weights)

    async def update_weights(
        self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool = False, timeout_s: float
    ) -> None:
        """As `GeneratorPool.update_weights`."""
        await super().update_weights(update, mode=mode, keep_kv=keep_kv, timeout_s=timeout_s)
        self._has_named_weights = True
        if self._has_turn:
            self._parts.places.go_on(gives_places=True)
