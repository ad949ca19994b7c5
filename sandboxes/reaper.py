"""Whose box is it, and is its owner still alive? Removes the boxes of dead owners, and never another's.

A box ends with its owner in three ways, none of which needs the others:

- in the box: the toolbox ends, and the container with it, when its connection to the owner does (the kernel closes
  that of a process that is killed), and when nothing has come over it for the spec's `dead_man_s`;
- at the next start: whoever opens boxes with `open_provider` sweeps first;
- by hand: `driftgym sandbox reap` sweeps.

What processes of this machine leave in place of a box: `owned_folders`.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxInfo, SandboxSpec
from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.docker_request import RefusedError
from driftgym.sandboxes.owners import is_owner_alive, own_host, own_label

_logger = logging.getLogger(__name__)

OWNER_LABEL = "driftgym.owner"
RUN_LABEL = "driftgym.run"
LEASE_LABEL = "driftgym.lease"
"""Seconds of its owner's silence after which a box ends itself."""
GONE_WITHIN_S = 10.0
"""A box whose owner was killed is gone so soon by its own doing, on an engine that answers.

What was created and not yet started has nobody in it who could end it: the next sweep removes that.
"""
ABANDONED_AFTER_S = 3600.0
"""What does not run, so long after it was created, has no owner who waits for it, wherever that one lived."""
_NOT_RUNNING = ("created", "exited", "dead")
_MAX_CONCURRENT_REMOVALS = 8


def labels_of(spec: SandboxSpec, *, run_id: str) -> dict[str, str]:
    """What a box of this process is labelled with."""
    return {OWNER_LABEL: own_label(), RUN_LABEL: run_id, LEASE_LABEL: f"{spec.dead_man_s:g}"}


async def list_boxes(engine: Engine) -> list[SandboxInfo]:
    """Every box of driftgym's that the engine knows, in any state. Raises SandboxError when it does not answer."""
    try:
        filters = json.dumps({"label": [OWNER_LABEL]})
        found = (await engine.request("GET", "/containers/json", all="true", filters=filters)).value
    except RefusedError as error:
        raise SandboxError(f"boxes cannot be listed: {error}") from None
    return [_info(container) for container in found]


def _info(container: Mapping[str, Any]) -> SandboxInfo:
    labels = container.get("Labels") or {}
    owner = labels.get(OWNER_LABEL, "")
    return SandboxInfo(
        sandbox_id=container["Id"],
        owner=owner,
        state=container.get("State") or "unknown",
        age_s=max(0.0, time.time() - container.get("Created", 0)),
        owner_is_alive=is_owner_alive(owner),
        labels=labels,
    )


def is_left_over(box: SandboxInfo) -> bool:
    """True when nobody can want the box any more: its owner is dead, or it does not run and has been so for long."""
    if not box.owner_is_alive:
        return True
    is_elsewhere = not box.owner.startswith(f"{own_host()}:") and LEASE_LABEL in box.labels
    return is_elsewhere and box.state in _NOT_RUNNING and box.age_s > ABANDONED_AFTER_S


async def sweep(engine: Engine) -> int:
    """Removes every box that is left over; how many. Several may sweep at once.

    Raises:
        SandboxError: the engine does not answer when it is asked what there is. A box that cannot be removed is
            logged, and the others are removed all the same.
    """
    left = [box.sandbox_id for box in await list_boxes(engine) if is_left_over(box)]
    turns = asyncio.Semaphore(_MAX_CONCURRENT_REMOVALS)

    async def remove(sandbox_id: str) -> bool:
        async with turns:
            try:
                await engine.remove(sandbox_id)
            except SandboxError as error:
                _logger.warning("a box of a dead owner cannot be removed: %s", error)
                return False
            return True

    return sum(await asyncio.gather(*(remove(sandbox_id) for sandbox_id in left)))
