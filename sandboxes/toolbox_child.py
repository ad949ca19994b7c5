"""The toolbox's children: forked ahead, they wait for a request, give up every right and do what it asks.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.

To fork a Python process takes longer than most commands, and what the toolbox writes to is copied after each. So some
children, the spares, are forked before they are needed: each has its pipes, its session and its place before the memory
killer already, and waits, still as root, where no process of the agent's can reach it. It gives up its rights
(`toolbox_rights`) when its request has come, since they carry the request's tag.
"""

from __future__ import annotations

import os
import resource
import sys

from driftgym.sandboxes.toolbox_files import clean_up, read_file, write_file
from driftgym.sandboxes.toolbox_rights import Rights
from driftgym.sandboxes.toolbox_system import READ_BYTES, TAG_NAME, resolve_path, send_signal, signal
from driftgym.sandboxes.toolbox_tree import pack, unpack
from driftgym.sandboxes.toolbox_wire import decode

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "fsize": resource.RLIMIT_FSIZE, "data": resource.RLIMIT_DATA}
MAX_SPARE_TEXT_BYTES = 32 * 1024
"""A longer request would not fit into the pipe at once, and gets a child that knows it already."""
WARM_UP = b'{"id": 0, "op": "exec", "timeout_s": 1.0, "argv": ["sh", "-c", "true"], "cwd": "/work", "env": {}}'
CONTROL, REPORT = 3, 4
MAX_CLOSED = 4096
CANNOT_START = 127
INVALID = 22
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Forker:
    """Starts children; keeps some ahead."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.libc = load_libc() if settings.get("is_local") else None
        self.rights = Rights(settings)
        self.limits = hard_limits(settings["limits"])
        settings["environment"] = base_environment(settings)
        self.pid = os.getpid()
        self.max_fd = max_closed_fd()
        self.num_spares: int = settings.get("num_spares", 1)
        self.is_used = False  # a box that is kept ready and was not asked yet keeps one
        self.spares: dict[int, list[int]] = {}  # by pid: where its request goes; its standard input, output, error
        if settings.get("is_local") and self.libc is not None:
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # every orphan below becomes a child

    @property
    def is_full(self) -> bool:
        """True when there are as many spares as there should be."""
        return len(self.spares) >= (self.num_spares if self.is_used else 1)

    def prepare(self) -> bool:
        """Forks a child ahead; false when none is to be had."""
        try:
            pid, fds = self.fork(b"")
        except OSError:
            return False
        self.spares[pid] = fds
        return True

    def start(self, text: bytes) -> tuple[int, list[int]]:
        """A child that does what the request `text` asks, and the ends of its standard input, output and error.

        Raises OSError when no process, or no pipe, is to be had.
        """
        self.is_used = True
        while self.spares and len(text) <= MAX_SPARE_TEXT_BYTES:
            pid = next(iter(self.spares))  # the oldest
            fds = self.spares.pop(pid)
            try:
                os.write(fds[0], text)
                return pid, fds[1:]
            except OSError:  # the memory killer has taken it
                for fd in fds[1:]:
                    os.close(fd)
            finally:
                os.close(fds[0])
        pid, fds = self.fork(text)
        os.close(fds[0])
        return pid, fds[1:]

    def drop(self) -> None:
        """Ends all spares."""
        for pid in self.spares:
            send_signal(pid, signal.SIGKILL)
        self.forget(*self.spares)

    def forget(self, *pids: int) -> None:
        """These spares have ended."""
        for pid in pids:
            for fd in self.spares.pop(pid):
                os.close(fd)

    def fork(self, text: bytes) -> tuple[int, list[int]]:
        """A child that waits for its request, unless it is `text`. Raises OSError when none is to be had."""
        ends: list[int] = []
        try:
            for _ in range(4):
                ends += os.pipe()
            pid = os.fork()
        except OSError:
            for fd in ends:
                os.close(fd)
            raise
        if pid == 0:
            self.be_child(ends, text)
        for fd in (ends[0], ends[2], ends[5], ends[7]):
            os.close(fd)
        return pid, [ends[1], ends[3], ends[4], ends[6]]

    def be_child(self, ends: list[int], text: bytes) -> NoReturn:
        """The life of a child."""
        code = CANNOT_START
        try:
            signal.set_wakeup_fd(-1)  # it is the toolbox's: a signal to this process must not look like one to that
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            take_pipes([ends[2], ends[5], ends[7], ends[0]], self.max_fd)
            os.setsid()
            if self.settings.get("is_local") and self.libc is not None:
                self.libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != self.pid:
                    os._exit(code)
            # While still root: of this box, the kernel shall kill the agent's processes for memory, not the toolbox.
            write_path("/proc/self/oom_score_adj", b"1000")
            for which, limit in self.limits:
                resource.setrlimit(which, (limit, limit))
            if not text:
                warm_up(self.settings)
                text = read_request()
            if text:
                code = self.serve(decode(text))
        except OSError as error:
            os.write(REPORT, f"{error.filename or 'cannot start'}: {error.strerror}".encode("utf-8", "replace"))
        except BaseException as error:
            os.write(REPORT, f"cannot start: {error or type(error).__name__}".encode("utf-8", "replace"))
        finally:
            os._exit(code)

    def serve(self, request: dict[str, Any]) -> int:
        """Gives up every right, and does what is asked. Raises OSError when that cannot be begun."""
        settings = self.settings
        if request["op"] == "spawn":  # its standard error is dropped, and its third pipe tells whether it started
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self.rights.give_up(request["op"], request["id"])
        os.chdir(resolve_path(settings["work_dir"], request.get("cwd", "/")))
        return BODIES[request["op"]](settings, request)


def take_pipes(ends: list[int], max_fd: int) -> None:
    """Makes `ends` standard input, output and error, where requests come from, and where reports go; closes the rest.

    What belongs to other commands would keep their pipes open.
    """
    for number, fd in enumerate(ends[:3]):
        os.dup2(fd, number)
    if ends[3] != CONTROL:
        os.dup2(ends[3], CONTROL, inheritable=False)
    os.dup2(2, REPORT, inheritable=False)
    if max_fd:
        os.closerange(REPORT + 1, max_fd)
        return
    for name in os.listdir("/proc/self/fd"):
        if int(name) > REPORT:
            try:  # noqa: SIM105 (contextlib costs milliseconds at each start)
                os.close(int(name))
            except OSError:  # that of the listing itself
                pass


def max_closed_fd() -> int:
    """Up to where all descriptors can be closed at once; 0 where that is not so, and a listing takes less.

    Python 3.10 asks the kernel to; where that cannot (gVisor's), it tries each that there might be.
    """
    try:
        is_new = sys.version_info >= (3, 10) and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 9)
    except ValueError:
        is_new = False
    max_fd = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max_fd if is_new and 0 < max_fd <= MAX_CLOSED else 0


def warm_up(settings: dict[str, Any]) -> None:
    """Does once what a request will need, in vain: what this process writes to is copied now, and not then."""
    request = decode(WARM_UP)
    os.path.join("/", request["argv"][0])
    resolve_path(settings["work_dir"], request["cwd"])
    try:  # noqa: SIM105 (contextlib costs milliseconds at each start)
        os.execve("", request["argv"], environment(settings, request))
    except OSError:
        pass


def read_request() -> bytes:
    """What comes until the toolbox closes its end; empty when that gives this child up, or has ended."""
    text = b""
    while True:
        data = os.read(CONTROL, READ_BYTES)
        if not data:
            return text
        text += data


def base_environment(settings: dict[str, Any]) -> dict[str, str]:
    """What every command is given."""
    variables = {
        "LANG": "C.UTF-8",
        **os.environ,
        "HOME": settings["work_dir"],
        "TMPDIR": settings["tmp_dir"],
    }
    port = settings.get("egress_port")
    if port is not None:
        url = f"http://127.0.0.1:{port}"
        variables.update(dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url))
        variables["no_proxy"] = "localhost,127.0.0.1"
    return variables


def environment(settings: dict[str, Any], request: dict[str, Any]) -> dict[str, str]:
    """What one command is given."""
    tag = settings.get("box_tag", "") + str(request["id"])
    return {**settings["environment"], **request.get("env", {}), TAG_NAME: tag}


def replace_process(settings: dict[str, Any], request: dict[str, Any]) -> int:
    """Becomes the program. Raises OSError, with the program as file name, when it cannot be started."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    argv, variables = request["argv"], environment(settings, request)
    if not argv or not argv[0]:
        raise OSError(INVALID, "there is no program to start")
    if any(not name or "=" in name for name in request.get("env", {})):
        raise OSError(INVALID, "a variable's name is empty, or holds '='")
    program = argv[0]
    # Not os.execvpe, which imports a module at its first use: that takes longer than all the rest.
    folders = [""] if "/" in program else variables.get("PATH", os.defpath).split(":")
    reason = OSError(2, "No such file or directory")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), argv, variables)
        except OSError as error:
            if error.errno not in (2, 20) or len(folders) == 1:  # no such file; not a folder
                reason = error
    raise OSError(reason.errno, reason.strerror, program) from None


def hard_limits(limits: dict[str, int]) -> list[tuple[int, int]]:
    """The limits of a child, by the kernel's number; never above those that hold already."""
    found = [(resource.RLIMIT_CORE, 0)]
    for name, limit in limits.items():
        hard = resource.getrlimit(LIMITS[name])[1]
        found.append((LIMITS[name], limit if hard == resource.RLIM_INFINITY else min(limit, hard)))
    return found


def load_libc() -> Any:
    """The C library, for what Python has no function for; None where it cannot be had."""
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):
        return None


def write_path(path: str, data: bytes) -> None:
    """Writes to a file of /proc."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, data)
    os.close(fd)


def in_box(settings: dict[str, Any], request: dict[str, Any]) -> str:
    """The path of a request, in this box."""
    return resolve_path(settings["work_dir"], request["path"])


def own_uid(settings: dict[str, Any]) -> int:
    """The user whose files a child works on."""
    return os.geteuid() if settings["uid"] is None else settings["uid"]


BODIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], int]] = {
    "exec": replace_process,
    "spawn": replace_process,
    "read": lambda settings, request: read_file(in_box(settings, request), request["max_output_bytes"]),
    "write": lambda settings, request: write_file(in_box(settings, request)),
    "upload": lambda settings, request: unpack(in_box(settings, request)),
    "download": lambda settings, request: pack(in_box(settings, request), request["max_bytes"], request["max_files"]),
    "reset": lambda settings, request: clean_up(settings["roots"], own_uid(settings)),
}
