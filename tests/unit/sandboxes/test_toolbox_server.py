"""The server inside the box, spoken to in raw frames: replay, parts and credit, the dead-man timer, nonsense."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driftgym.sandboxes.owners import process_start_time
from driftgym.sandboxes.toolbox_io import HEADER, MAX_FRAME_BYTES, MAX_RECORDED
from driftgym.sandboxes.toolbox_program import local_command

ANSWER_TIMEOUT_S = 20.0


class Server:
    """A toolbox as a child of the test, and its frames."""

    def __init__(self, folder: Path, **more: object) -> None:
        for name in ("work", "tmp"):
            (folder / name).mkdir()
        self.work = folder / "work"
        settings = {"uid": None, "work_dir": str(self.work), "tmp_dir": str(folder / "tmp"), "limits": {}}
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                local_command({**settings, "is_local": True, "box_tag": f"{folder.name}-", **more}),
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
            )
        self.incoming = b""
        assert self.receive()[0]["event"] == "ready"

    def send(self, payload: bytes = b"", **message: object) -> None:
        """Sends a frame."""
        text = json.dumps(message).encode()
        self.socket.sendall(HEADER.pack(len(text), len(payload)) + text + payload)

    def run(self, request_id: int, line: str, **more: object) -> None:
        """Asks for a shell line."""
        self.send(id=request_id, op="exec", argv=["sh", "-c", line], timeout_s=30, max_output_bytes=10**9, **more)

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[dict[str, Any], bytes]:
        """The next frame. Raises TimeoutError when none comes, EOFError at the end."""
        while True:
            if len(self.incoming) >= HEADER.size:
                num_text, num_payload = HEADER.unpack_from(self.incoming)
                end = HEADER.size + num_text + num_payload
                if len(self.incoming) >= end:
                    frame, self.incoming = self.incoming[HEADER.size : end], self.incoming[end:]
                    return json.loads(frame[:num_text]), frame[num_text:]
            if not select.select([self.socket], [], [], timeout_s)[0]:
                raise TimeoutError
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self.incoming += data

    def is_quiet(self, for_s: float = 0.2) -> bool:
        """True when nothing comes for a while."""
        try:
            self.receive(for_s)
        except TimeoutError:
            return True
        return False

    def memory_kib(self) -> int:
        """The most memory that it has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

    def end(self) -> str:
        """Ends its input, and returns what it complained of."""
        self.socket.close()
        words = self.process.communicate(timeout=ANSWER_TIMEOUT_S)[1]
        return words.decode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.end()


# -- replay


def test_request_that_is_asked_again_is_not_run_again(server: Server) -> None:
    server.run(1, "echo x >>ran; cat ran; sleep 0.3", cwd="/work")
    server.run(1, "echo x >>ran; cat ran; sleep 0.3", cwd="/work")
    first = server.receive()
    assert (first[0]["id"], first[0]["exit_code"], first[1]) == (1, 0, b"x\n")
    assert server.is_quiet(), "it was answered twice"
    server.run(1, "echo x >>ran; cat ran")
    assert server.receive() == first
    assert (server.work / "ran").read_text() == "x\n"


def test_old_and_long_answers_are_refused_and_never_run(server: Server) -> None:
    server.run(1, "echo x >>ran; head -c 1000000 /dev/zero", cwd="/work")
    while "exit_code" not in server.receive()[0]:
        pass
    for request_id in range(2, MAX_RECORDED + 4):
        server.send(id=request_id, op="ping")
        assert server.receive() == ({"id": request_id}, b"")
    for request_id in (1, 2, 0, -5):
        server.run(request_id, "echo x >>ran", cwd="/work")
        answer = server.receive()[0]
        assert (answer["id"], answer["error"]) == (request_id, "replayed")
    server.send(id=MAX_RECORDED, op="exec", argv=["touch", "ran2"], timeout_s=5)
    assert server.receive() == ({"id": MAX_RECORDED}, b"")
    assert (server.work / "ran").read_text() == "x\n"
    assert not (server.work / "ran2").exists()


def test_record_is_bounded_by_bytes(server: Server) -> None:
    for request_id in range(1, 60):
        server.run(request_id, "head -c 30000 /dev/zero")
        assert len(server.receive()[1]) == 30_000
    server.run(1, "true")
    assert server.receive()[0]["error"] == "replayed"
    server.run(59, "true")
    assert len(server.receive()[1]) == 30_000


# -- parts and credit


def test_output_waits_for_a_client_that_takes_none(server: Server) -> None:
    server.run(1, "head -c 50000000 /dev/zero; echo done >&2")
    time.sleep(0.5)
    server.send(id=2, op="ping")
    before = server.memory_kib()
    num_bytes, ids = 0, []
    while 1 not in ids:
        message, payload = server.receive()
        if message.get("event") == "part":
            num_bytes += len(payload)
        else:
            ids.append(message["id"])
            num_bytes += message.get("num_stdout", 0)
    assert num_bytes == 50_000_000
    assert ids == [2, 1]
    assert payload.endswith(b"done\n")
    assert server.memory_kib() - before < 4_000


def test_output_with_a_window_leaves_only_as_far_as_its_credit(server: Server) -> None:
    server.run(1, "head -c 1000000 /dev/zero", window=100_000)
    num_bytes = 0
    while num_bytes < 100_000:
        num_bytes += len(server.receive()[1])
    assert num_bytes < 300_000
    assert server.is_quiet()
    server.send(id=2, op="ping")
    assert server.receive()[0] == {"id": 2}
    server.send(op="credit", key=1, num_bytes=10_000_000)
    while "exit_code" not in (received := server.receive())[0]:
        num_bytes += len(received[1])
    assert num_bytes + received[0]["num_stdout"] == 1_000_000


def test_input_goes_on_as_it_is_taken(server: Server) -> None:
    server.run(1, "read -r line; echo $line; wc -c", more=True)
    server.send(b"hel", op="input", key=1)
    server.send(b"lo\nrest", op="input", key=1)
    credit = [server.receive()[0]["num_bytes"] for _ in range(2)]
    assert credit == [3, 7]
    server.send(op="input", key=1, end=True)
    answer, payload = server.receive()
    assert (answer["exit_code"], payload.split()) == (0, [b"hello", b"4"])
    server.send(b"late", op="input", key=1)
    server.send(id=2, op="ping")
    assert server.receive()[0] == {"id": 2}


def test_input_that_nothing_reads_is_told(server: Server) -> None:
    server.run(1, "exec <&-; sleep 0.5", more=True)
    time.sleep(0.2)
    server.send(b"x" * 60_000, op="input", key=1)
    assert server.receive()[0] == {"event": "credit", "key": 1, "num_bytes": -1}
    assert server.receive()[0]["exit_code"] == 0


# -- its end


def test_silent_owner_ends_the_box_and_all_that_it_runs(tmp_path: Path) -> None:
    server = Server(tmp_path, dead_man_s=0.7)
    server.run(1, "echo $$; exec sleep 60 >&-")
    for _ in range(8):
        time.sleep(0.2)
        server.send(op="beat")
    server.send(id=2, op="ping")
    assert server.receive()[0] == {"id": 2}
    with pytest.raises(EOFError):
        server.receive()
    assert "silent" in server.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "nonsense",
    [HEADER.pack(MAX_FRAME_BYTES, 1), HEADER.pack(5, 0) + b"hello", HEADER.pack(3, 0) + b"[1]", HEADER.pack(0, 0)],
    ids=["too long", "no JSON", "no object", "empty"],
)
def test_nonsense_ends_the_box(tmp_path: Path, nonsense: bytes) -> None:
    server = Server(tmp_path)
    server.run(1, "exec sleep 60")
    server.socket.sendall(nonsense)
    with pytest.raises(EOFError):
        server.receive()
    assert "no owner" in server.end()
    assert list(tmp_path.iterdir()) == []


def test_unknown_operation_is_an_error_and_no_end(server: Server) -> None:
    server.send(id=1, op="dance")
    assert server.receive()[0]["error"] == "start"
    server.send(op="dance")
    server.send(id=2, op="ping")
    assert server.receive()[0] == {"id": 2}


# -- the child that is forked ahead


def children(server: Server) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ]


def test_spare_child_serves_and_is_replaced_when_it_dies(server: Server) -> None:
    server.run(1, "echo $$")
    first = int(server.receive()[1])
    time.sleep(0.2)
    (spare,) = children(server)
    assert spare != first
    server.run(2, "echo $$")
    assert int(server.receive()[1]) == spare
    time.sleep(0.2)
    (spare,) = children(server)
    os.kill(spare, signal.SIGKILL)
    time.sleep(0.2)
    server.run(3, "echo $$")
    assert int(server.receive()[1]) != spare
    time.sleep(0.2)
    assert len(children(server)) == 1


def test_several_spare_children_serve_in_turn_and_are_made_up_for(tmp_path: Path) -> None:
    server = Server(tmp_path, num_spares=3)
    time.sleep(0.3)
    assert len(children(server)) == 1, "nothing was asked yet"
    server.run(50, "echo $$")
    assert server.receive()[0]["exit_code"] == 0
    time.sleep(0.3)
    spares = children(server)
    assert len(spares) == 3
    for request_id, expected in enumerate(sorted(spares), start=51):  # ids of processes count upwards
        server.run(request_id, "echo $$")
        assert int(server.receive()[1]) == expected
    for request_id in range(54, 90):  # more in a row than there are
        server.run(request_id, "echo $$")
        assert server.receive()[0]["exit_code"] == 0
    time.sleep(0.3)
    left = children(server)
    assert len(left) == 3
    assert not {*left} & {*spares}
    os.kill(left[1], signal.SIGKILL)
    time.sleep(0.3)
    assert len(children(server)) == 3
    server.send(id=90, op="reset", timeout_s=10, cwd="/", keep_files=False)
    assert server.receive()[0]["exit_code"] == 0
    server.run(91, "sleep 60 & echo started")
    assert server.receive()[1] == b"started\n"
    server.send(id=92, op="reset", timeout_s=10, cwd="/", keep_files=False)
    assert server.receive()[0]["exit_code"] == 0
    time.sleep(0.3)
    assert len(children(server)) == 3
    server.end()


def test_spare_child_ends_with_the_toolbox(server: Server) -> None:
    time.sleep(0.2)
    (spare,) = children(server)
    server.process.kill()
    server.process.wait()
    for _ in range(100):
        if process_start_time(spare) is None:
            return
        time.sleep(0.02)
    pytest.fail("the spare child is still there")


def test_reset_keeps_files_when_asked_to(server: Server) -> None:
    server.run(1, "echo x >kept; (sleep 60 &)", cwd="/work")
    server.receive()
    server.send(id=2, op="reset", timeout_s=10, cwd="/", keep_files=True)
    assert server.receive()[0]["exit_code"] == 0
    assert (server.work / "kept").exists()
    assert len(children(server)) <= 1
    server.send(id=3, op="reset", timeout_s=10, cwd="/", keep_files=False)
    assert server.receive()[0]["exit_code"] == 0
    assert list(server.work.iterdir()) == []


def test_reset_restores_the_folders_themselves(server: Server) -> None:
    before = server.work.stat()
    server.run(
        1, "chmod 0700 .; touch -d 2001-01-01 .; setfattr -n user.x -v y . 2>/dev/null; mkdir a; chmod 0 a", cwd="/work"
    )
    server.receive()
    server.send(id=2, op="reset", timeout_s=10, cwd="/", keep_files=False)
    answer, words = server.receive()
    assert (answer["exit_code"], words) == (0, b"")
    after = server.work.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert os.listxattr(server.work) == []


# -- children


@pytest.mark.parametrize("num_files", [1024, 8192])
def test_child_that_waits_holds_nothing_of_other_commands(tmp_path: Path, num_files: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, before[1]))
    try:
        server = Server(tmp_path, egress_port=free_port())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for request_id in range(1, 9):
        server.run(request_id, "exec sleep 60")
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    held: set[str] = set()
    while held != {"0", "1", "2", "3", "4"} and time.monotonic() < deadline:
        time.sleep(0.01)
        held = held_by_spare(server.process.pid)
    assert held == {"0", "1", "2", "3", "4"}
    server.end()


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def held_by_spare(pid: int) -> set[str]:
    """The descriptors of the one child that has become no program yet; empty when there are none or several."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = [child for child in children if os.readlink(f"/proc/{child}/exe") == os.readlink(f"/proc/{pid}/exe")]
    return set(os.listdir(f"/proc/{own[0]}/fd")) if len(own) == 1 else set()
