"""A Docker engine of a test's own, to be killed, stopped and started again. The machine's engine is left alone."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_PAUSE_S = 0.2


class PrivateEngine:
    """A `dockerd` with a folder, a socket and a containerd of its own, and without any network of containers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "config.json").write_text("{}")

    @property
    def host(self) -> str:
        """What DOCKER_HOST says to mean this engine."""
        return f"unix://{self._folder}/engine.sock"

    @property
    def is_there(self) -> bool:
        """True while its process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it, and waits until it answers. Raises RuntimeError with its last words when it does not."""
        for stale in ("engine.pid", "exec/containerd/containerd.pid"):  # of one that was killed, or is a zombie
            (self._folder / stale).unlink(missing_ok=True)
        with (self._folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not self.is_there or time.monotonic() > deadline:
                words = (self._folder / "engine.log").read_text(errors="replace")[-1500:]
                raise RuntimeError(f"a private dockerd does not start: {words}")
            time.sleep(_PAUSE_S)

    def _command(self) -> list[str]:
        options = {
            "config-file": "config.json",
            "data-root": "data",
            "exec-root": "exec",
            "pidfile": "engine.pid",
        }
        paths = [f"--{option}={self._folder / name}" for option, name in options.items()]
        rest = [
            f"--cgroup-parent=/{self._folder.name}",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--log-level=warn",
            f"--host={self.host}",
        ]
        # In a network of its own: a daemon without a bridge removes `docker0`, which is the machine's engine's.
        return ["unshare", "--net", "dockerd", *paths, *rest]

    def _answers(self) -> bool:
        """Asked without the SDK, which forgets to close a socket that cannot be connected."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            try:
                connection.connect(str(self._folder / "engine.sock"))
                connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
                return connection.recv(100).split()[1:2] == [b"200"]
            except OSError:
                return False

    def _api(self) -> docker.APIClient:
        return docker.APIClient(base_url=self.host, version="1.41", timeout=60)

    def load(self, image: str) -> None:
        """Gives it an image of the machine's engine."""
        if not self._has(image):
            with contextlib.closing(docker.APIClient(timeout=60)) as source, contextlib.closing(self._api()) as target:
                for _ in target.load_image(source.get_image(image)):
                    pass

    def _has(self, image: str) -> bool:
        with contextlib.closing(self._api()) as api:
            return bool(api.images(image))

    def containers(self) -> list[str]:
        """The ids of its containers, in any state."""
        with contextlib.closing(self._api()) as api:
            return [container["Id"] for container in api.containers(all=True)]

    def volumes(self) -> list[str]:
        """The names of its volumes."""
        with contextlib.closing(self._api()) as api:
            return [volume["Name"] for volume in api.volumes()["Volumes"] or []]

    def processes_in_containers(self) -> list[int]:
        """The processes that run in its containers, as this machine numbers them."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cgroup"):
            with contextlib.suppress(OSError):
                if f"/{self._folder.name}/" in entry.read_text():
                    found.append(int(entry.parent.name))
        return found

    def groups(self) -> list[Path]:
        """The folders of its control groups: one, or one per controller of the older kind."""
        root = Path("/sys/fs/cgroup")
        return [*root.glob(self._folder.name), *root.glob(f"*/{self._folder.name}")]

    def send(self, number: signal.Signals) -> None:
        """Signals the engine alone: what supervises its containers is other processes."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> None:
        """Waits for its end."""
        assert self._process is not None
        self._process.wait(_STOP_TIMEOUT_S)

    def remove(self) -> None:
        """Ends it and every process of its own, and removes its folder."""
        if self.is_there:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.send(signal.SIGKILL)
                self.wait()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._unmount()
        self._remove_groups()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pids(self) -> list[int]:
        """What it has started, by the folder in its command line: containerd and the supervisors of containers."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self._folder).encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
        return [pid for pid in found if pid != os.getpid()]

    def _remove_groups(self) -> None:
        """Removes the control groups of its containers, which the kernel may hold until their processes are gone."""
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while left := self.groups():
            for root in left:
                for folder, _, _ in os.walk(root, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            if time.monotonic() > deadline:
                raise RuntimeError(f"control groups of a private dockerd cannot be removed: {left}")
            time.sleep(_PAUSE_S)

    def _unmount(self) -> None:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((path for path in mounts if path.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


@contextlib.contextmanager
def private_engine(image: str) -> Iterator[PrivateEngine]:
    """An engine that has `image`; skips where none can run, and fails where DRIFTGYM_REQUIRE names docker."""
    engine = PrivateEngine(Path(tempfile.mkdtemp(prefix="driftgym-engine-")))
    try:
        try:
            engine.start()
        except (OSError, RuntimeError) as error:
            if "docker" in os.environ.get("DRIFTGYM_REQUIRE", "").split(","):
                pytest.fail(f"DRIFTGYM_REQUIRE names docker: {error}")
            pytest.skip(str(error))
        engine.load(image)
        yield engine
    finally:
        engine.remove()
