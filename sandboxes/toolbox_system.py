"""What the toolbox asks of the system: process trees, killing them, counters.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

How a process tree is found: each command has a tag that its descendants inherit, also when they daemonise. In a
container that is a supplementary group, which a process without capabilities can neither drop nor take; in a local
box it is a variable of the environment, whose value also names the box.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    import signal as signal
    from collections.abc import Callable, Collection
else:
    try:
        import _signal as signal  # what `signal` wraps into enumerations, which takes milliseconds too
    except ImportError:
        import signal

READ_BYTES = 64 * 1024
MAX_PIPE_BYTES = 1024 * 1024
GROUP_BASE = 1 << 20
TAG_NAME = "DRIFTGYM_CALL"
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
KILL_WAIT_S = 5.0
KILL_PAUSE_S = 0.0005
ENDED = (b"Z", b"X")
NUM_THREADS_AT = 17
"""Field 20 of /proc/PID/stat, counted from the state."""
MAX_STOP_ROUNDS = 100


def read_some(fd: int, num_bytes: int = READ_BYTES) -> bytes:
    """What can be read now; empty at the end, and when there is nothing."""
    try:
        return os.read(fd, num_bytes)
    except OSError:
        return b""


def read_path(path: str) -> bytes:
    """The start of a file of /proc; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return read_some(fd)
    finally:
        os.close(fd)


def resolve_path(work_dir: str, path: str) -> str:
    """`path` in this box: "/work" means the work folder, and relative paths start there."""
    if path == "/work" or path.startswith("/work/"):
        return work_dir + path[len("/work") :]
    return os.path.join(work_dir, path)


# -- processes


def process_table() -> dict[int, int]:
    """The parent of each process that has not ended."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = process_fields(int(name))
            if not has_ended(fields):
                table[int(name)] = int(fields[1])
    return table


def processes_below(pid: int) -> dict[int, int]:
    """The parent of each process below `pid`. Where the kernel lists children, other processes cost nothing."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        table = process_table()
        return {child: table[child] for child in descendants(table, {pid})}
    found = {}
    pending = [pid]
    while pending:
        parent = pending.pop()
        for child in children_of(parent):
            if child not in found and not has_ended(process_fields(child)):
                found[child] = parent
                pending.append(child)
    return found


def children_of(pid: int) -> list[int]:
    """The children that the threads of a process have; empty when it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in read_path(f"/proc/{pid}/task/{thread}/children").split()]


def process_fields(pid: int) -> list[bytes]:
    """State, parent and so on from /proc/PID/stat; a process that has ended is a zombie here."""
    return read_path(f"/proc/{pid}/stat").rpartition(b")")[2].split() or [b"Z", b"0"]


def has_ended(fields: list[bytes]) -> bool:
    """True of a zombie, and not of a process whose first thread has ended while others run on."""
    return fields[0] in ENDED and (len(fields) <= NUM_THREADS_AT or int(fields[NUM_THREADS_AT]) <= 1)


def descendants(table: dict[int, int], roots: set[int]) -> set[int]:
    """The children of `roots`, their children, and so on."""
    found: set[int] = set()
    layer = roots
    while layer:
        layer = {pid for pid, parent in table.items() if parent in layer and pid not in found}
        found |= layer
    return found


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    try:  # noqa: SIM105 (contextlib costs milliseconds at each start)
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_all(find: Callable[[], set[int]]) -> None:
    """Kills all that `find` returns. First stops them until it finds nothing new: what is stopped cannot fork."""
    stopped: set[int] = set()
    num_quiet = 0
    for _ in range(MAX_STOP_ROUNDS):
        new = find() - stopped
        for pid in new:
            send_signal(pid, signal.SIGSTOP)
        stopped |= new
        num_quiet = 0 if new else num_quiet + 1
        if num_quiet == 2:  # one look can miss the child of a process that ends meanwhile
            break
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def tag_in_environment(pid: int, box_tag: str) -> int | None:
    """The command of the local box `box_tag` that a process came from; None when it cannot be told."""
    start = f"{TAG_NAME}={box_tag}".encode()
    for line in read_path(f"/proc/{pid}/environ").split(b"\0"):
        if line.startswith(start) and line[len(start) :].isdigit():
            return int(line[len(start) :])
    return None


class ProcessTrees:
    """Finds and kills what came from a command, or from all of them."""

    def __init__(self, is_local: bool, box_tag: str, spare_pids: Callable[[], Collection[int]]) -> None:
        self.is_local = is_local
        self.box_tag = box_tag
        self.spare_pids = spare_pids

    def kill(self, key: int, root: int, all_roots: set[int]) -> None:
        """Kills the command `key`, whose first process is `root`, and everything that came from it."""
        kill_all(lambda: self.tree_of(key, root, all_roots - {root}))

    def kill_everything(self, reap: Callable[[], None], on_kill: Callable[[], None]) -> bool:
        """Kills and collects every process of the box but the toolbox; false when some survive for seconds.

        In a container the toolbox's spares go with them, which `on_kill` tells. Where there is nothing, they stay.
        """
        deadline = time.monotonic() + KILL_WAIT_S
        while self.all_processes() or self.all_processes():  # one look can miss what is born meanwhile
            if time.monotonic() > deadline:
                return False
            if self.is_local:
                kill_all(lambda: set(self.all_processes()))
            else:
                send_signal(-1, signal.SIGKILL)  # all at once: nothing can be born between
                on_kill()
            reap()
            time.sleep(KILL_PAUSE_S)
            reap()
        return True

    def is_alone(self) -> bool:
        """True when there is no other process in the box; no look into /proc, which can miss one, is so sure."""
        if not self.is_local and not self.spare_pids():
            try:
                os.kill(-1, 0)
            except ProcessLookupError:
                return True
        return not self.all_processes()

    def all_processes(self) -> dict[int, int]:
        """The parent of every process of the box but the toolbox, its spares and a container's process 1."""
        table = processes_below(os.getpid()) if self.is_local else process_table()
        for pid in (os.getpid(), *self.spare_pids(), *(() if self.is_local else (1,))):
            table.pop(pid, None)
        return table

    def tree_of(self, key: int, root: int, other_roots: set[int]) -> set[int]:
        """What came from `root`, and what hides where it came from: of a local box orphans; of a container whatever
        has shed its groups, which takes a kernel that gives away user namespaces (gVisor's)."""
        table = self.all_processes()
        found = {root} & set(table)
        for pid in set(table) - other_roots:
            tag = self.tag_of(pid)
            if tag == key or (tag is None and self.may_hide(table[pid])):
                found.add(pid)
        return (found | descendants(table, found)) - other_roots

    def may_hide(self, parent: int) -> bool:
        """True when a process of no command may be one that hides; what came in from outside has no parent here."""
        return parent == os.getpid() if self.is_local else parent != 0

    def tag_of(self, pid: int) -> int | None:
        """The command that a process came from; None when it cannot be told."""
        if self.is_local:
            return tag_in_environment(pid, self.box_tag)
        for line in read_path(f"/proc/{pid}/status").split(b"\n"):
            if line.startswith(b"Groups:") and line.split()[1:]:
                tag = int(line.split()[-1]) - GROUP_BASE
                return tag if tag >= 0 else None
        return None


class OomCounter:
    """How many processes the container's memory limit has killed so far; always 0 where the kernel does not tell."""

    def __init__(self, is_local: bool) -> None:
        self.fd = -1
        for path in () if is_local else OOM_COUNTERS:
            if self.fd < 0 and os.path.exists(path):
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.seen = 0
        self.num_new()

    def num_new(self) -> int:
        """How many since this was asked last."""
        if self.fd < 0:
            return 0
        count = self.seen
        for line in os.pread(self.fd, 4096, 0).split(b"\n"):
            if line.startswith(b"oom_kill "):
                count = int(line.split()[1])
        num_new, self.seen = count - self.seen, count
        return num_new
