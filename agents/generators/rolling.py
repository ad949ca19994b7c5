"""New weights for a pool: engine after engine, so that no more than a share of them stands still at once."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from driftgym.agents.generators.base import WeightUpdateMode, WeightVersion
from driftgym.agents.generators.members import Member
from driftgym.agents.generators.roster import Roster
from driftgym.errors import GeneratorError
from driftgym.types import WeightUpdate


class Weights:
    """Brings the engines of a pool to the latest weights, and those that join or missed some.

    Consumes updates, one after the other; waits for the engines, each within a part of the update's time, so that one
    which hangs does not keep the others from theirs.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        policy_version: int,
        came_with: WeightUpdate | None,
        max_paused_share: float,
        timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """All engines have `policy_version`.

        Args:
            roster: whose engines.
            policy_version: of the weights that they came with.
            came_with: where those are, for engines that join; None when that is not known.
            max_paused_share: of the engines, at most so many are given weights at once; one at least.
            timeout_s: bounds one engine's catching up.
            on_change: called whenever an engine has new weights, or takes slices again.
        """
        self._roster = roster
        self._max_paused_share = max_paused_share
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._updating = asyncio.Lock()
        self._updates: list[WeightUpdate] = [] if came_with is None else [came_with]
        self.latest_version = policy_version

    @property
    def latest_update(self) -> WeightUpdate | None:
        """The latest weights; None when the engines still have those that they came with, and nobody said which."""
        return self._updates[-1] if self._updates else None

    @property
    def latest_full(self) -> WeightUpdate | None:
        """The latest weights that an engine can start from; those after them build on these."""
        return next((update for update in reversed(self._updates) if update.kind == "full"), None)

    async def update(self, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool, deadline_s: float) -> None:
        """Brings every engine that is in to `update`; one that fails is out until it has caught up.

        Raises:
            GeneratorError: another update took all the time.
            ValueError: `keep_kv` goes with `in_flight` alone.
        """
        if keep_kv and mode != "in_flight":
            raise ValueError(f"keep_kv goes with in_flight alone, not with {mode}")
        if update.transport == "tensor" and not keep_kv:
            # The engine's memory holds these weights already: what ran had ended before, and what waits there waits
            # for this update.
            mode = "in_flight"
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._updating.acquire()
        except TimeoutError:
            raise GeneratorError("the weights before are still being taken") from None
        try:
            self._remember(update)
            members = self._roster.present
            num_at_once = max(1, int(self._max_paused_share * len(members)))
            places = asyncio.Semaphore(num_at_once)
            num_left = len(members)

            async def bring(member: Member) -> None:
                nonlocal num_left
                async with places:
                    num_waves = math.ceil(num_left / num_at_once)
                    num_left -= 1
                    timeout_s = (deadline_s - time.monotonic()) / num_waves
                    await self._bring(member, update, mode=mode, keep_kv=keep_kv, timeout_s=timeout_s)

            await asyncio.gather(*(bring(member) for member in members))
        finally:
            self._updating.release()

    def _remember(self, update: WeightUpdate) -> None:
        """Keeps what an engine needs that missed some: the latest weights, and where these build on others, those."""
        if update.kind == "full":
            self._updates.clear()
        if update.kind == "lora":  # an adapter takes the place of the one before
            self._updates = [each for each in self._updates if each.kind != "lora"]
        self._updates.append(update)
        self.latest_version = update.policy_version

    async def _bring(
        self, member: Member, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool, timeout_s: float
    ) -> None:
        async with member.changing:
            if not member.is_in or member.policy_version >= update.policy_version:
                return
            self._halt(member, True)
            deadline_s = time.monotonic() + timeout_s
            try:
                await self._take(member, update, mode=mode, keep_kv=keep_kv, deadline_s=deadline_s)
            except GeneratorError as error:
                self._roster.put_behind(member, error)
            except BaseException:
                self._roster.put_behind(member, GeneratorError(f"weights {update.policy_version} were broken off"))
                raise
            else:
                member.policy_version = update.policy_version
            finally:
                self._halt(member, False)

    def _halt(self, member: Member, is_updating: bool) -> None:
        member.is_updating = is_updating
        member.halted.run(is_updating)
        self._on_change()

    async def _take(
        self, member: Member, update: WeightUpdate, *, mode: WeightUpdateMode, keep_kv: bool, deadline_s: float
    ) -> None:
        """Gives it the weights. Before, with `drain`, the requests that have begun there end, slice by slice."""
        if mode == "drain":
            member.is_draining = True
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await member.empty(of_requests=True)
            except TimeoutError:
                raise GeneratorError(f"not drained in time for weights {update.policy_version}") from None
            finally:
                member.is_draining = False
        left_s = deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await member.generator.update_weights(update, mode=mode, keep_kv=keep_kv, timeout_s=left_s)
        except TimeoutError:
            raise GeneratorError(f"weights {update.policy_version} were not taken in time") from None

    def are_right(self, member: Member, version: WeightVersion) -> bool:
        """Whether `version` is what `member` was given."""
        update = self.latest_update
        is_ours = update is None or version.incarnation == update.incarnation
        return is_ours and version.policy_version == member.policy_version

    async def catch_up(self, member: Member) -> None:
        """Brings one that takes no slices to the latest weights.

        Raises:
            GeneratorError: it does not take them, or nothing that it could be given leads there.
        """
        try:
            async with asyncio.timeout(self._timeout_s), member.changing:
                await self._catch_up(member)
        except TimeoutError:
            raise GeneratorError(f"weights {self.latest_version} were not taken within {self._timeout_s} s") from None

    async def _catch_up(self, member: Member) -> None:
        version = await self._version_of(member)
        while version != self.latest_version:  # which may rise meanwhile
            for update in self._way_from(version):
                await member.generator.update_weights(update, mode="in_flight", timeout_s=self._timeout_s)
            version = (await member.generator.health()).version.policy_version
        member.policy_version = version

    async def _version_of(self, member: Member) -> int | None:
        """The version of its weights; None for those that this life of the run did not publish."""
        try:
            version: WeightVersion = (await member.generator.health()).version
        except GeneratorError:
            if self.latest_update is None:
                raise
            return None  # it may live, with weights that have no name
        update = self.latest_update
        is_foreign = update is not None and version.incarnation != update.incarnation
        return None if is_foreign else version.policy_version

    def _way_from(self, version: int | None) -> Sequence[WeightUpdate]:
        """The updates that lead from `version` to the latest weights."""
        for index in reversed(range(len(self._updates))):
            update = self._updates[index]
            if update.kind == "full" or (version is not None and update.base_policy_version == version):
                return self._updates[index:]
        had = "weights of another run" if version is None else f"weights {version}"
        raise GeneratorError(f"it has {had}, the others {self.latest_version}, and nothing leads there")
