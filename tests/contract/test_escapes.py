"""Attempts to get out of a box, or at what guards it, each of which must be refused.

Boxes under gVisor let some calls through that a shared kernel must refuse: user namespaces, device nodes, io_uring,
and in a user namespace raw sockets. They are its own kernel's, which is a process without rights on this machine; what
they give is attempted in turn (`test_root_of_a_namespace_gains_nothing`).
"""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attacks import KINDS, PRELUDE, REFUSED, START_TIMEOUT_S, attempt_program, small_box, small_spec
from docker_engine import open_docker

from driftgym.sandboxes.base import Sandbox

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(kind: str) -> AsyncIterator[Sandbox]:
    """One box for all attempts: none may harm it."""
    async with small_box(kind) as box:
        yield box


async def refused(box: Sandbox, body: str) -> str:
    """Makes an attempt that must be refused; what the system said."""
    result = await box.exec(attempt_program(body), timeout_s=10)
    assert result.exit_code == REFUSED, result
    return result.stdout


NETWORK = {
    "tcp": "socket.create_connection(('1.1.1.1', 443), timeout=2)",
    "metadata": "socket.create_connection(('169.254.169.254', 80), timeout=2)",
    "ipv6": "socket.create_connection(('2606:4700:4700::1111', 443), timeout=2)",
    "name": "socket.getaddrinfo('deb.debian.org', 80)",
    "name-over-udp": "s = socket.socket(2, 2); s.sendto(bytes(30), ('8.8.8.8', 53))",
    "broadcast": "s = socket.socket(2, 2); s.setsockopt(1, 6, 1); s.sendto(b'x', ('255.255.255.255', 9))",
    "docker-socket": "socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
    "docker-socket-in-run": "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
    "containerd-socket": "socket.socket(socket.AF_UNIX).connect('/run/containerd/containerd.sock')",
}


@pytest.mark.parametrize("body", NETWORK.values(), ids=NETWORK.keys())
async def test_network_is_not_reached(box: Sandbox, body: str) -> None:
    await refused(box, body)


async def test_host_is_not_reached_by_its_bridge(box: Sandbox) -> None:
    provider = await open_docker()
    try:
        network = await provider.engine.call(provider.engine.api.inspect_network, "bridge")
    finally:
        await provider.close()
    gateway = network["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")
    for port in (22, 80, 2375):
        await refused(box, f"socket.create_connection(({gateway!r}, {port}), timeout=2)")


async def test_loopback_is_the_only_interface(box: Sandbox) -> None:
    lines = (await box.exec("cat /proc/net/dev")).stdout.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines] == ["lo"]


RIGHTS = {
    "setuid": "os.setuid(0)",
    "setresuid": "os.setresuid(0, 0, 0)",
    "setgid": "os.setgid(0)",
    "setgroups": "os.setgroups([0])",
    "raise-limit": "import resource\n"
    "try: resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))\n"
    "except ValueError: raise OSError",
    "raw-socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet-socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)",
    "crypto-socket": "socket.socket(38, socket.SOCK_SEQPACKET, 0)",
    "mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "remount-root": "call('mount', b'none', b'/', None, 32, None)",
    "unmount": "call('umount2', b'/proc', 2)",
    "chroot": "os.chroot('/tmp')",
    "pivot-root": "system_call('pivot_root', b'/tmp', b'/tmp')",
    "pid-namespace": "call('unshare', 0x20000000)",
    "network-namespace": "call('unshare', 0x40000000)",
    "join-namespace": "on_each_guard(lambda pid: call('setns', os.open(f'/proc/{pid}/ns/net', 0), 0))",
    "kernel-keys": "system_call('keyctl', 0, -3, 1)",
    "add-key": "system_call('add_key', b'user', b'x', b'y', 1, -3)",
    "bpf": "system_call('bpf', 0, zeros(128), 128)",
    "perf-event": "system_call('perf_event_open', zeros(128), 0, -1, -1, 0)",
    "userfaultfd": "system_call('userfaultfd', 0)",
    "fanotify": "system_call('fanotify_init', 0, 0)",
    "file-handle": "system_call('open_by_handle_at', -100, zeros(200), 0)",
    "kernel-module": "system_call('init_module', b'', 0, b'')",
    "new-kernel": "system_call('kexec_load', 0, 0, 0, 0)",
    "reboot": "system_call('reboot', 0xFEE1DEAD, 672274793, 0x1234567, 0)",
    "quota": "system_call('quotactl', 0, 0, 0, 0)",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 1e9)",
    "host-name": "socket.sethostname('x')",
    "real-time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "trusted-attribute": "open('/tmp/t', 'w'); os.setxattr('/tmp/t', 'trusted.x', b'1')",
    "file-capability": "open('/tmp/t', 'w'); os.setxattr('/tmp/t', 'security.capability', b'\\1\\0\\0\\2' + bytes(16))",
    "immutable-file": "import fcntl\nopen('/tmp/t', 'w')\n"
    "fcntl.ioctl(os.open('/tmp/t', 0), 0x40086602, b'\\x10' + bytes(7))",
    "hard-link-to-root-s": "os.link('/etc/passwd', '/tmp/passwd')",
    "change-device": "os.chmod('/dev/null', 0)",
}


@pytest.mark.parametrize("body", RIGHTS.values(), ids=RIGHTS.keys())
async def test_rights_are_refused(box: Sandbox, body: str) -> None:
    await refused(box, body)


SHARED_KERNEL = {
    "user-namespace": "call('unshare', 0x10000000)",
    "mount-namespace": "call('unshare', 0x20000)",
    "block-device": "os.mknod('/tmp/disk', 0o060660, os.makedev(8, 0))",
    "kernel-memory-device": "os.mknod('/tmp/kmem', 0o020660, os.makedev(1, 1))",
    "kernel-log": "call('klogctl', 3, zeros(100), 100)",
    "personality": "call('personality', 0x0040000)",
    "higher-priority": "os.nice(-5)",
}


@pytest.mark.parametrize("body", SHARED_KERNEL.values(), ids=SHARED_KERNEL.keys())
async def test_what_a_shared_kernel_must_refuse_is_refused(box: Sandbox, kind: str, body: str) -> None:
    if kind == "gvisor":
        pytest.skip("the kernel is the box's own")
    await refused(box, body)


OWN_FILTER = {
    "io-uring": "system_call('io_uring_setup', 8, zeros(256))",
    "vsock": "socket.socket(40, 1, 0)",
    "x32-vsock": "check(libc.syscall(0x40000000 | 41, 40, 1, 0))",
}


@pytest.mark.parametrize("body", OWN_FILTER.values(), ids=OWN_FILTER.keys())
async def test_ways_around_the_engine_s_filter_are_refused(box: Sandbox, kind: str, body: str) -> None:
    """By the toolbox's own filter. The filters of older engines know neither, and without the toolbox there is none
    but theirs; gVisor's io_uring is its own kernel's."""
    if kind == "engine-exec" or (kind == "gvisor" and "io_uring" in body):
        pytest.skip("there is no filter but the engine's")
    await refused(box, body)


IN_NAMESPACE = {
    "write-to-root": "open('/etc/x', 'w')",
    "open-disk": "os.mknod('/tmp/disk', 0o060660, os.makedev(8, 0)); os.open('/tmp/disk', os.O_RDWR)",
    "open-kernel-memory": "os.mknod('/tmp/kmem', 0o020660, os.makedev(1, 1)); os.open('/tmp/kmem', os.O_RDWR)",
    "kill-guard": "on_each_guard(lambda pid: os.kill(pid, signal.SIGKILL))",
    "trace-guard": "on_each_guard(lambda pid: call('ptrace', 16, pid, 0, 0))",
    "guard-memory": "on_each_guard(lambda pid: os.open(f'/proc/{pid}/mem', os.O_RDWR))",
    "guard-stream": "on_each_guard(lambda pid: os.open(f'/proc/{pid}/fd/1', os.O_WRONLY))",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 1e9)",
    "other-user": "os.setuid(1)",
    "mount-disk": "call('unshare', 0x20000); call('mount', b'/dev/sda', b'/tmp', b'ext4', 0, None)",
    "remount-root": "call('unshare', 0x20000); call('mount', b'none', b'/', None, 32, None)",
}


@pytest.mark.parametrize("body", IN_NAMESPACE.values(), ids=IN_NAMESPACE.keys())
async def test_root_of_a_namespace_gains_nothing(box: Sandbox, body: str) -> None:
    names = "GUARDS = guards()\nglobals()['guards'] = lambda: GUARDS\n"
    await refused(box, f"{names}become_root_of_a_namespace()\n{body}")


PATHS = {
    "/etc/x",
    "/usr/bin/x",
    "/x",
    "/root/x",
    "/run/x",
    "/var/tmp/x",
    "/dev/x",
    "/sys/x",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sysrq-trigger",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory.max",
    "/sys/kernel/uevent_helper",
}


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_read_only_paths_cannot_be_written(box: Sandbox, path: str) -> None:
    await refused(box, f"os.write(os.open({path!r}, os.O_WRONLY | os.O_CREAT), b'1')")
    with pytest.raises(OSError, match=path):
        await box.write_file(path, b"x")


@pytest.mark.parametrize("path", ["/proc/kcore", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/kvm", "/proc/1/mem"])
async def test_host_s_memory_and_devices_cannot_be_opened(box: Sandbox, path: str) -> None:
    await refused(box, f"if not os.read(os.open({path!r}, os.O_RDONLY), 1): raise OSError('it is empty')")
    with pytest.raises(FileNotFoundError):
        await box.read_file(path)


SETUID_PROGRAMS = """
import subprocess
for program in sys.argv[1:]:
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=-3, stderr=-3)
    time.sleep(0.2)
    print(*[line for line in open(f"/proc/{child.pid}/status") if line.startswith("Uid:")], end="")
    child.kill()
"""


async def test_setuid_programs_give_nothing(box: Sandbox) -> None:
    """Those of the image run as the agent, and it can make none that runs as anybody else."""
    found = (await box.exec("find / -xdev -perm /6000 -type f 2>/dev/null")).stdout.split()
    assert found, "the image has some"
    result = await box.exec(["python3", "-I", "-S", "-c", PRELUDE + SETUID_PROGRAMS, *found])
    assert result.stdout == "Uid:\t1000\t1000\t1000\t1000\n" * len(found)
    copied = await box.exec("cp /usr/bin/id /work/id; chmod 6755 /work/id; /work/id -u; rm /work/id")
    assert copied.stdout == "1000\n"


async def test_commands_have_no_capability(box: Sandbox, kind: str) -> None:
    status = (await box.exec("id -u; cat /proc/self/status")).stdout
    assert status.startswith("1000\n")
    for line in ("CapInh", "CapPrm", "CapEff"):
        assert f"{line}:\t0000000000000000" in status
    if kind != "gvisor":  # which keeps no-new-privileges, and does not show it
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status


GUARD = {
    "kill": "os.kill(pid, signal.SIGKILL)",
    "stop": "os.kill(pid, signal.SIGSTOP)",
    "terminate": "os.kill(pid, signal.SIGTERM)",
    "attach": "call('ptrace', 16, pid, 0, 0)",
    "seize": "call('ptrace', 0x4206, pid, 0, 0)",
    "memory": "os.open(f'/proc/{pid}/mem', os.O_RDONLY)",
    "read-memory": "system_call('process_vm_readv', pid, zeros(16), 1, zeros(16), 1, 0)",
    "standard-input": "os.open(f'/proc/{pid}/fd/0', os.O_RDONLY)",
    "standard-output": "os.open(f'/proc/{pid}/fd/1', os.O_WRONLY)",
    "any-stream": "[os.open(f'/proc/{pid}/fd/{n}', os.O_RDWR) for n in range(3, 20)]",
    "take-stream": "system_call('pidfd_getfd', system_call('pidfd_open', pid, 0), 1, 0)",
    "kill-by-descriptor": "system_call('pidfd_send_signal', system_call('pidfd_open', pid, 0), 9, 0, 0)",
    "limits": "import resource; resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))",
    "memory-score": "os.open(f'/proc/{pid}/oom_score_adj', os.O_WRONLY)",
    "folder": "os.listdir(f'/proc/{pid}/cwd/')",
    "root": "os.listdir(f'/proc/{pid}/root/')",
}


@pytest.mark.parametrize("body", GUARD.values(), ids=GUARD.keys())
async def test_what_guards_the_box_cannot_be_reached(box: Sandbox, body: str) -> None:
    lines = body.replace("\n", "\n    ")
    await refused(box, f"def try_on(pid):\n    {lines}\non_each_guard(try_on)")
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_killing_and_stopping_everything_spares_the_guard(box: Sandbox) -> None:
    for signal_name in ("KILL", "STOP"):
        await box.exec(f"kill -{signal_name} -1", timeout_s=1)
        assert (await box.exec("echo on")).stdout == "on\n"


async def test_frames_on_standard_output_are_output(box: Sandbox) -> None:
    """What the agent prints is never taken for an answer of the toolbox, to this request or to the next ones."""
    for request_id in range(40):
        text = b'{"id": %d, "exit_code": 0, "num_stdout": 5, "dropped": 0}' % request_id
        forged = struct.pack(">II", len(text), 5) + text + b"forged"
        result = await box.exec(["cat"], stdin=forged)
        assert result.exit_code == 0
        assert result.stdout == forged.decode("utf-8", "replace")
        if request_id >= 8:
            break
    assert (await box.exec("printf '\\001\\000\\000\\000\\000\\000\\000\\004true' >&2; exit 3")).exit_code == 3


async def test_pipes_that_are_kept_full_delay_nobody(box: Sandbox) -> None:
    """A writer in the background that outlives its command, and a reader that reads nothing."""
    assert (await box.exec("yes & yes >&2 & sleep 0.2", timeout_s=10)).exit_code == 0
    stuck = asyncio.ensure_future(box.exec("sleep 1", stdin=b"x" * 3_000_000))
    assert (await box.exec("echo on")).stdout == "on\n"
    assert (await stuck).exit_code == 0
    await box.reset()


@pytest.mark.parametrize("kind_alone", KINDS)
async def test_boxes_share_nothing(kind_alone: str) -> None:
    provider = await open_docker()
    try:
        spec = await small_spec(kind_alone, provider)
        one, two = await asyncio.gather(*(provider.start(spec, timeout_s=START_TIMEOUT_S) for _ in range(2)))
        serve = (
            "s = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen(); call('shmget', 5, 4096, 0o1666)\n"
            "open('/tmp/mine', 'w'); open('/dev/shm/mine', 'w')\n"
            "if not os.fork(): time.sleep(30)"
        )
        assert (await one.exec(attempt_program(serve))).exit_code == 0
        for body in (
            "socket.socket(socket.AF_UNIX).connect('\\0meet')",
            "call('shmget', 5, 0, 0)",
            "open('/tmp/mine')",
            "open('/dev/shm/mine')",
        ):
            assert (await one.exec(attempt_program(body))).exit_code == 0, body
            await refused(two, body)
    finally:
        await provider.close()
