"""Whose box is it, and is its owner still alive? Removes the boxes of dead owners, and never another's."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker.errors

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxInfo
from driftgym.sandboxes.docker import Engine

_logger = logging.getLogger(__name__)

OWNER_LABEL = "driftgym.owner"
RUN_LABEL = "driftgym.run"
_START_TIME_FIELD = 19
"""Field 22 of /proc/PID/stat, counted from the state, which is field 3."""


def process_start_time(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])


def own_host() -> str:
    """Where this process's id means something: containers of one host may share its name, and number apart."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def own_label() -> str:
    """This process as an owner: host, process id, start time. A process id alone would be used again."""
    return f"{own_host()}:{os.getpid()}:{process_start_time(os.getpid())}"


def is_owner_alive(owner: str) -> bool:
    """False only when it is certain that the owner is gone: it was on this host, and is not there any more."""
    rest, _, started = owner.rpartition(":")
    host, _, pid = rest.rpartition(":")
    if host != own_host() or not pid.isdecimal() or not started.isdecimal():
        return True
    return process_start_time(int(pid)) == int(started)


async def list_boxes(engine: Engine) -> list[SandboxInfo]:
    """Every box of driftgym's that the engine knows, in any state. Raises SandboxError when it does not answer."""
    try:
        found = await engine.call(engine.api.containers, all=True, filters={"label": [OWNER_LABEL]})
    except docker.errors.APIError as error:
        raise SandboxError(f"boxes cannot be listed: {error}") from None
    return [_info(container) for container in found]


def _info(container: Mapping[str, Any]) -> SandboxInfo:
    labels = container["Labels"]
    owner = labels[OWNER_LABEL]
    return SandboxInfo(
        sandbox_id=container["Id"],
        owner=owner,
        state=container["State"],
        age_s=max(0.0, time.time() - container["Created"]),
        owner_is_alive=is_owner_alive(owner),
        labels=labels,
    )


async def sweep(engine: Engine) -> int:
    """Removes every box whose owner is dead; how many. Raises SandboxError when the engine does not answer."""
    num_removed = 0
    for box in await list_boxes(engine):
        if box.owner_is_alive:
            continue
        try:
            await engine.remove(box.sandbox_id)
            num_removed += 1
        except SandboxError as error:  # the others are removed all the same
            _logger.warning("a box of a dead owner cannot be removed: %s", error)
    return num_removed
