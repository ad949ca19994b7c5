"""The processes that compute a step together, seen from one of them; torch.distributed, over gloo.

All of them run the same code on the same rows (one program, several processes): each takes its share of the rows, and
what depends on the whole batch is computed by each from what all of them gave. Every method here but `share` is a
meeting: each process must come to it, the same number of times and in the same order.
"""

import contextlib
import datetime
import io
import math
import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from driftgym.trainer.batching import Row

_T = TypeVar("_T")
_HOST = "127.0.0.1"
_LOOPBACK = "lo"
# The caller's deadline rules: it knows how long a call may take, and kills the learner as a whole.
_TIMEOUT = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The place of this process among those that compute a step together.

    >>> ALONE.is_first, ALONE.gather("mine"), ALONE.largest(3)
    (True, ['mine'], 3)
    """

    rank: int
    """Of this process, from 0."""
    size: int
    """How many there are; 1: this one alone, and no meeting takes place."""
    mesh: DeviceMesh | None = None
    """All of them, as torch's sharding takes it; None for one alone."""

    @property
    def is_first(self) -> bool:
        """True in the process that answers for all of them, and writes files."""
        return self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """The `value` of each process, by rank. Plain objects and tensors only."""
        if self.size == 1:
            return [value]
        written = io.BytesIO()
        torch.save(value, written)
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, written.getvalue())
        # Bytes of a process of this learner: they are as trusted as its code.
        return [torch.load(io.BytesIO(each), weights_only=False) for each in gathered]

    def largest(self, value: int) -> int:
        """The largest `value` of any process."""
        if self.size == 1:
            return value
        shared = torch.tensor(value)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
        return int(shared)

    def root_of_squares(self, value: torch.Tensor) -> torch.Tensor:
        """[] the root of the sum of the squares of each process's [] `value`: a norm from the norms of parts."""
        if self.size == 1:
            return value
        squares = value.double().square()
        torch.distributed.all_reduce(squares)
        return squares.sqrt().to(value.dtype)

    def share(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that this process computes; the same `rows` in each process."""
        return list(rows) if self.size == 1 else shares(rows, num=self.size)[self.rank]


ALONE = Ranks(rank=0, size=1)
"""A process that computes its steps by itself."""


def shares(rows: Sequence[Row], *, num: int) -> list[list[Row]]:
    """`rows` in `num` shares of about as many tokens each, some of them empty where there are few rows.

    The rows of a trajectory stay together, since objectives look at them together; those of a group do where it is no
    more than an even share, since they have a prompt in common that is computed once. Within a share rows keep their
    order.
    """
    total = max(1, sum(row.num_inputs for row in rows))
    units: list[list[int]] = []
    for group in _by_name(range(len(rows)), [row.segment.group_id or row.segment.trajectory_id for row in rows]):
        num_parts = max(1, math.ceil(_num_inputs(rows, group) * num / total))
        trajectories = _by_name(group, [rows[index].segment.trajectory_id for index in group])
        units += _dealt([(trajectory, _num_inputs(rows, trajectory)) for trajectory in trajectories], num=num_parts)
    dealt = _dealt([(unit, _num_inputs(rows, unit)) for unit in units], num=num)
    return [[rows[index] for index in sorted(share)] for share in dealt]


def _by_name(indices: Sequence[int], names: Sequence[Hashable]) -> list[list[int]]:
    """`indices` in lists of one name each, which keep the order."""
    named: dict[Hashable, list[int]] = {}
    for index, name in zip(indices, names, strict=True):
        named.setdefault(name, []).append(index)
    return list(named.values())


def _num_inputs(rows: Sequence[Row], indices: Sequence[int]) -> int:
    return sum(rows[index].num_inputs for index in indices)


def _dealt(units: Sequence[tuple[list[int], int]], *, num: int) -> list[list[int]]:
    """Units of a size in `num` hands: the largest first, each to the hand that holds least."""
    hands: list[list[int]] = [[] for _ in range(num)]
    sizes = [0] * num
    for unit, size in sorted(units, key=lambda each: -each[1]):
        least = min(range(num), key=sizes.__getitem__)
        hands[least] += unit
        sizes[least] += size
    return hands


class Rendezvous:
    """Where the processes of a learner find each other: a store on a free port of the loopback interface."""

    def __init__(self, *, size: int) -> None:
        """Opens it, for `size` processes; the first of them does."""
        # A socket of its own: the store would listen on every interface.
        listener = socket.socket()
        listener.bind((_HOST, 0))
        listener.listen()
        self.port: int = listener.getsockname()[1]
        """That the others are told."""
        self._store = TCPStore(
            _HOST, self.port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def join(*, port: int, rank: int, size: int) -> Ranks:
    """Meets the other processes; returns when all have come.

    Args:
        port: of the `Rendezvous`.
        rank: of this process.
        size: how many there are.
    """
    if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    store = TCPStore(_HOST, port, size, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return Ranks(rank=rank, size=size, mesh=DeviceMesh("cpu", list(range(size))))


def leave() -> None:
    """Ends what `join` began; nothing happens without."""
    if torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # another process is gone already
            torch.distributed.destroy_process_group()
