"""Attempts to leave something to the next episode: after a reset a box is as it was, or says that it is not."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attacks import KINDS, PRELUDE, REFUSED, START_TIMEOUT_S, assert_reason, attempt_program, small_spec
from docker_engine import open_docker

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import Sandbox, SandboxSpec
from driftgym.sandboxes.docker_provider import DockerProvider

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

LOOK = """
import fcntl, json
def look(folder):
    try: about = os.stat(folder)
    except OSError: return None
    names = sorted(os.listdir(folder))
    try: attributes = sorted((name, os.getxattr(folder, name).hex()) for name in os.listxattr(folder))
    except OSError: attributes = []
    flags = bytearray(8)
    try: fcntl.ioctl(os.open(folder, os.O_RDONLY), 0x80086601, flags)
    except OSError: pass
    return [names, oct(about.st_mode), about.st_uid, about.st_gid, attributes, flags.hex()]
def table(path):
    try: return open(path).read().count("\\n")
    except OSError: return 0
def sockets():
    try: lines = open("/proc/net/unix").read().split("\\n")
    except OSError: return []
    return [line.split()[-1] for line in lines[1:] if len(line.split()) > 7]
state = {folder: look(folder) for folder in ("/work", "/tmp", "/dev/shm", "/dev/mqueue", "/dev")}
state.update({path: table(path) for path in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")})
state["sockets"] = sockets()
state["guards"] = [os.getpriority(os.PRIO_PROCESS, pid) for pid in guards()]
state["umask"] = os.umask(0)
state["name"] = open("/proc/sys/kernel/hostname").read()
print(json.dumps(state))
"""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Boxes:
    """One box for all attempts, and a new one where it is thrown away."""

    def __init__(self, provider: DockerProvider, spec: SandboxSpec) -> None:
        self._provider = provider
        self._spec = spec
        self._box: Sandbox | None = None

    async def clean(self) -> Sandbox:
        """A box that has just been started or reset."""
        if self._box is not None:
            try:
                await self._box.reset()
            except SandboxError:
                await self._box.close()
                self._box = None
        if self._box is None:
            self._box = await self._provider.start(self._spec, timeout_s=START_TIMEOUT_S)
        return self._box


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(kind: str) -> AsyncIterator[Boxes]:
    provider = await open_docker()
    try:
        yield Boxes(provider, await small_spec(kind, provider))
    finally:
        await provider.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Boxes) -> Sandbox:
    """A clean box."""
    return await boxes.clean()


async def state_of(box: Sandbox) -> str:
    """What an episode could find of the one before."""
    result = await box.exec(["python3", "-I", "-S", "-c", PRELUDE + LOOK])
    assert result.exit_code == 0, result
    return result.stdout


LEFTOVERS = {
    "files": "for n in range(3000): open(f'/work/{n}', 'w')",
    "hidden": "open('/work/.hidden', 'w'); open('/tmp/...', 'w'); open('/dev/shm/.x', 'w')",
    "odd-names": "for name in (b'a\\nb', b'-rf', b'\\xff\\xfe', b'* ?', b'x' * 255): open(b'/work/' + name, 'w')",
    "deep": "os.chdir('/work')\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')",
    "locked": "os.makedirs('/work/a/b'); open('/work/a/b/c', 'w'); os.chmod('/work/a/b', 0); os.chmod('/work/a', 0)",
    "modes": "os.chmod('/work', 0o7777)",
    "locked-work": "os.chmod('/work', 0)",
    "group": "os.chown('/work', -1, os.getgroups()[-1])",
    "attributes": "os.setxattr('/work', 'user.note', b'for the next one')",
    "default-rights": "rights = ((1, 7, -1), (4, 0, -1), (32, 0, -1))\n"
    "os.setxattr('/work', 'system.posix_acl_default', struct.pack('<I', 2) + b''.join("
    "struct.pack('<HHi', *right) for right in rights))",
    "flags": "import fcntl\nfcntl.ioctl(os.open('/work', 0), 0x40086602, b'\\xc0' + bytes(7))",
    "links": "os.symlink('/etc', '/work/l'); os.symlink('/work', '/work/self'); open('/work/f', 'w')\n"
    "for n in range(300): os.link('/work/f', f'/work/h{n}')",
    "pipes-and-sockets": "os.mkfifo('/work/p'); s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s')",
    "shared-memory": "open('/dev/shm/sem.x', 'w').write('x' * 1000)",
    "message-queue": "open('/dev/mqueue/letter', 'w')",
    "abstract-socket": "s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()\n"
    "if not os.fork(): time.sleep(90)",
    "shared-memory-of-system-v": "call('shmget', 5, 4096, 0o1666)",
    "semaphore-of-system-v": "call('semget', 5, 1, 0o1666)",
    "queue-of-system-v": "call('msgget', 5, 0o1666)",
    "own-priority": "os.nice(10)",
    "mask": "os.umask(0o777); open('/work/x', 'w')",
    "stopped": "if not os.fork(): os.kill(os.getpid(), signal.SIGSTOP)",
    "files-in-flight": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [os.open('/work', 0)])\n"
    "if not os.fork(): time.sleep(90)",
    "open-and-removed": "f = open('/work/x', 'w'); os.unlink('/work/x')\nif not os.fork(): time.sleep(90)",
    "big": "open('/work/x', 'wb').write(bytes(7_000_000))",
}


MAY_STAY = {"group", "shared-memory-of-system-v", "semaphore-of-system-v", "queue-of-system-v"}
"""What the toolbox does not take back: it sees it, and the box is thrown away."""


@pytest.mark.parametrize("name", LEFTOVERS)
async def test_reset_leaves_nothing_or_says_so(box: Sandbox, name: str) -> None:
    before = await state_of(box)
    attempt = await box.exec(attempt_program(LEFTOVERS[name]), timeout_s=30)
    assert attempt.exit_code in (0, REFUSED), attempt  # some systems refuse some of it
    try:
        await box.reset()
    except SandboxError as error:
        assert name in MAY_STAY
        assert_reason(error, "not clean")
    else:
        assert await state_of(box) == before


async def test_times_of_the_work_folder_are_no_message(box: Sandbox) -> None:
    await box.exec(attempt_program("os.utime('/work', (5, 7)); os.utime('/tmp', (5, 7))"))
    await box.reset()
    assert "5" not in (await box.exec("stat -c '%X' /work; stat -c '%Y' /work", cwd="/")).stdout.split()
    times = (await box.exec(["python3", "-c", "import os; s = os.stat('/work'); print(s.st_atime, s.st_mtime)"])).stdout
    assert "5.0" not in times.split()
    assert "7.0" not in times.split()


async def test_reset_outruns_those_who_write_on(boxes: Boxes, kind: str) -> None:
    """Processes that fork and write without end meanwhile, and that do not listen to signals. A box under gVisor, whose
    kernel is a process within the box's own limits, may end as a whole, and says why."""
    box = await boxes.clean()
    before = await state_of(box)
    script = (
        "for n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "for _ in range(6):\n    if not os.fork(): break\n"
        "while True:\n"
        "    try:\n"
        "        name = f'/work/{os.getpid()}-{time.monotonic_ns()}'\n"
        "        os.mkdir(name); open(name + '/f', 'w').write('x')\n"
        "        if not os.fork(): os.setsid()\n"
        "        else: os._exit(0)\n"
        "    except OSError: pass\n"
    )
    for _ in range(3):
        call = asyncio.ensure_future(box.exec(attempt_program(script), timeout_s=30))
        try:
            await asyncio.sleep(0.3)
            await box.reset()
            assert await state_of(box) == before
            await call
        except SandboxError as error:
            await asyncio.gather(call, return_exceptions=True)
            if kind != "gvisor":
                raise
            assert_reason(error, "the container has ended")
            with pytest.raises(SandboxError):
                await box.ping(timeout_s=5)
            box = await boxes.clean()
            before = await state_of(box)


async def test_grading_reads_what_no_process_can_change_any_more(box: Sandbox) -> None:
    """`reset(keep_files=True)` ends every process, also one that rewrites its answer without end, and keeps files."""
    script = (
        "if not os.fork():\n    os.setsid()\n    while True: open('/work/answer', 'w').write(str(time.monotonic_ns()))"
    )
    await box.exec(attempt_program(script))
    await asyncio.sleep(0.2)
    await box.reset(keep_files=True)
    first = await box.read_file("/work/answer")
    await asyncio.sleep(0.2)
    assert await box.read_file("/work/answer") == first
    await box.reset()
    with pytest.raises(FileNotFoundError):
        await box.read_file("/work/answer")
