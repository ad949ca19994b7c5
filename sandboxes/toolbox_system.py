"""What the toolbox asks of the system: process trees, the step down to the agent's user, files, counters.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

How a process tree is found: each command has a tag that its descendants inherit, also when they daemonise. In a
container that is a supplementary group, which a process without capabilities can neither drop nor take; in a local
box it is a variable of the environment.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import time

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

READ_BYTES = 64 * 1024
MAX_PIPE_BYTES = 1024 * 1024
GROUP_BASE = 1 << 20
TAG_NAME = "DRIFTGYM_CALL"
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
IPC_TABLES = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
KILL_WAIT_S = 5.0
ENDED = (b"Z", b"X")
MAX_STOP_ROUNDS = 100
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "fsize": resource.RLIMIT_FSIZE, "data": resource.RLIMIT_DATA}


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
            if fields[0] not in ENDED:
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
            if child not in found and process_fields(child)[0] not in ENDED:
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


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan below it, where the platform lets it."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    except (ImportError, OSError, AttributeError):
        pass


class ProcessTrees:
    """Finds and kills what came from a command, or from all of them."""

    def __init__(self, is_local: bool) -> None:
        self.is_local = is_local

    def kill(self, key: int, root: int, all_roots: set[int]) -> None:
        """Kills the command `key`, whose first process is `root`, and everything that came from it."""
        kill_all(lambda: self.tree_of(key, root, all_roots - {root}))

    def kill_everything(self, reap: Callable[[], None]) -> bool:
        """Kills and collects every process of the box but the toolbox; false when some survive for seconds."""
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline:
            if self.is_local:
                kill_all(lambda: set(self.all_processes()))
            else:
                send_signal(-1, signal.SIGKILL)  # within the container: all but process 1 and the toolbox
            reap()
            if not self.all_processes():
                return True
            time.sleep(0.001)
        return False

    def all_processes(self) -> dict[int, int]:
        """The parent of every process of the box but the toolbox (and a container's process 1)."""
        if self.is_local:
            return processes_below(os.getpid())
        table = process_table()
        for pid in (1, os.getpid()):
            table.pop(pid, None)
        return table

    def tree_of(self, key: int, root: int, other_roots: set[int]) -> set[int]:
        """What came from `root`; of a local box also orphans that hide where they came from."""
        table = self.all_processes()
        found = {root} & set(table)
        for pid in set(table) - other_roots:
            tag = self.tag_of(pid)
            if tag == key or (tag is None and table[pid] == os.getpid()):
                found.add(pid)
        return (found | descendants(table, found)) - other_roots

    def tag_of(self, pid: int) -> int | None:
        """The command that a process came from; None when it cannot be told."""
        if self.is_local:
            for line in read_path(f"/proc/{pid}/environ").split(b"\0"):
                if line.startswith(TAG_NAME.encode() + b"="):
                    return int(line.split(b"=")[1])
            return None
        for line in read_path(f"/proc/{pid}/status").split(b"\n"):
            if line.startswith(b"Groups:") and line.split()[1:]:
                return int(line.split()[-1]) - GROUP_BASE
        return None


class OomCounter:
    """How many processes the container's memory limit has killed so far; always 0 where the kernel does not tell."""

    def __init__(self, is_local: bool) -> None:
        self.fd = -1
        for path in () if is_local else OOM_COUNTERS:
            if self.fd < 0 and os.path.exists(path):
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """The counter of the container's own control group."""
        if self.fd >= 0:
            for line in os.pread(self.fd, 4096, 0).split(b"\n"):
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
        return 0


# -- in the forked child


def run_as_agent(
    settings: dict[str, Any],
    request: dict[str, Any],
    ends: list[int],
    body: Callable[[dict[str, str]], int],
    is_line: bool,
) -> NoReturn:
    """Takes `ends` (three pipes) as its own, gives up every right, runs `body` with its environment, and exits.

    The third pipe is standard error, or, for a line process, tells why the program could not be started.
    """
    report = ends[5]
    code = 127
    try:
        signal.set_wakeup_fd(-1)  # it is the toolbox's: a signal to this process must not look like one to that
        os.setsid()
        # While still root: of this box, the kernel shall kill the agent's processes for memory, not the toolbox.
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"1000")
        os.dup2(ends[0], 0)
        os.dup2(ends[3], 1)
        if is_line:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        else:
            report = os.dup2(ends[5], 2)
            # A body that starts no program would keep the pipes of other commands open.
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        limit_resources(settings["limits"])
        if settings["uid"] is not None:
            os.setgroups([GROUP_BASE + request["id"]])
            os.setgid(settings["gid"])
            os.setuid(settings["uid"])
        os.chdir(resolve_path(settings["work_dir"], request.get("cwd", "")))
        code = body(
            {
                "LANG": "C.UTF-8",
                **os.environ,
                "HOME": settings["work_dir"],
                "TMPDIR": settings["tmp_dir"],
                **request.get("env", {}),
                TAG_NAME: str(request["id"]),
            }
        )
    except OSError as error:
        os.write(report, f"{error.filename or 'cannot start'}: {error.strerror}".encode())
    except Exception as error:
        os.write(report, repr(error).encode())
    finally:
        os._exit(code)


def limit_resources(limits: dict[str, int]) -> None:
    """Sets hard limits, never above those that hold already."""
    for name, limit in limits.items():
        hard = resource.getrlimit(LIMITS[name])[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(LIMITS[name], (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def replace_process(argv: list[str], env: dict[str, str]) -> int:
    """Becomes the program. Raises OSError, with the program as file name, when it cannot be started."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise OSError(error.errno, error.strerror, argv[0]) from None


def read_file(path: str, max_bytes: int) -> int:
    """Writes a regular file to standard output, at most one byte more than `max_bytes`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        check_regular(fd)
        num_left = max_bytes + 1
        while num_left:
            data = os.read(fd, min(num_left, READ_BYTES))
            if not data:
                break
            write_whole(1, data)
            num_left -= len(data)
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)
    return 0


def write_file(path: str) -> int:
    """Writes standard input to a file, and makes the folders above it."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        check_regular(fd)
        os.ftruncate(fd, 0)
        while True:
            data = os.read(0, READ_BYTES)
            if not data:
                return 0
            write_whole(fd, data)
    except (OSError, ValueError, RecursionError) as error:
        return report_error(error)


def clean_up(folders: list[str], is_local: bool) -> int:
    """Empties folders of the agent's; System V objects outlive processes: a container that holds some is not clean."""
    try:
        for folder in folders:
            empty_folder(folder)
        for path in () if is_local else IPC_TABLES:
            if read_path(path).count(b"\n") > 1:  # below the heading
                raise OSError(16, "objects are left in " + path)
    except OSError as error:
        return report_error(error)
    return 0


def empty_folder(folder: str) -> None:
    """Removes what is in a folder, however deep and whatever its permissions. Nothing else may be at work in it."""
    os.makedirs(folder, exist_ok=True)
    if os.stat(folder).st_uid == os.geteuid():
        os.chmod(folder, 0o755)  # whoever owns it may have locked it
    os.chdir(folder)
    pending = [unlink_files()]
    names: list[str] = []
    while pending:
        if pending[-1]:
            name = pending[-1].pop()
            os.chmod(name, 0o700)
            os.chdir(name)  # step by step, since a whole path may be too long for the kernel
            names.append(name)
            pending.append(unlink_files())
        else:
            pending.pop()
            if names:
                os.chdir("..")
                os.rmdir(names.pop())


def unlink_files() -> list[str]:
    """Removes all but the folders from the current folder; returns the folders' names."""
    folders = []
    for entry in list(os.scandir(".")):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            os.unlink(entry.name)
    return folders


def check_regular(fd: int) -> None:
    """Raises OSError for devices, pipes and folders."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(22, "Not a regular file")


def write_whole(fd: int, data: bytes) -> None:
    """Writes all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def report_error(error: Exception) -> int:
    """Tells the client the error's number and words; the exit code is that of a failed body. What Python raises for a
    path that cannot be (a null byte, half a character, thousands of folders) is EINVAL to the client."""
    number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (22, "Invalid path")
    sys.stderr.write(f"{number or 0} {words}")
    sys.stderr.flush()
    return 1
