"""The server inside the box: runs commands, answers many calls at once, kills process trees.

This file, `toolbox_io` and `toolbox_system` use the standard library only and any Python from 3.8 on that the image
holds: they come in with the box (`toolbox_program`) and nothing is installed. The one argument is a JSON object:

    uid, gid    the user that commands run as; null keeps the toolbox's own user (a local box, trusted code)
    work_dir    what "/work" means in a path
    tmp_dir     where temporary files go
    more_dirs   further folders that `reset` empties
    limits      {"nofile": n, "fsize": n, "data": n}: resource limits of every command; each may be absent
    is_local    true for a local child: it adopts orphans, to find them again, and removes its folders at the end

A request has `id` and `op`, its answer the same `id`; unasked comes `{"event": "ready" | "ended", ...}`. The end of
standard input is the end of the box. One thread and no polling: everything waits in one epoll.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from driftgym.sandboxes.toolbox_io import Channel, Child, Poller
from driftgym.sandboxes.toolbox_system import (
    READ_BYTES,
    OomCounter,
    ProcessTrees,
    adopt_orphans,
    clean_up,
    empty_folder,
    read_file,
    read_some,
    replace_process,
    resolve_path,
    run_as_agent,
    write_file,
)

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_WAIT_S = 3600.0
"""The kernel takes no wait of many days; a deadline may be that far, or infinite."""


class Toolbox:
    """The event loop: requests in, processes, answers out."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.is_local = bool(settings.get("is_local"))
        self.children: dict[int, Child] = {}
        self.poller = Poller()
        self.channel = Channel(self.poller)
        self.trees = ProcessTrees(self.is_local)
        self.oom_counter = OomCounter(self.is_local)
        if self.is_local:
            adopt_orphans()

    def run(self) -> None:
        """Serves until standard input ends, or SIGTERM; then nothing that it started is left."""
        self.watch_signals()
        self.poller.on_readable(0, self.on_requests)
        self.channel.send({"event": "ready", "python": sys.version.split()[0]})
        while not self.channel.is_closed:
            self.poller.wait(self.next_timeout())
            self.expire()
        self.trees.kill_everything(self.reap)
        if self.is_local:
            for folder in (self.settings["tmp_dir"], self.settings["work_dir"]):
                empty_folder(folder)
                os.rmdir(folder)

    def watch_signals(self) -> None:
        """Lets SIGCHLD and SIGTERM wake the loop."""
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.poller.on_readable(wake_r, lambda: self.on_signals(read_some(wake_r)))

    def on_signals(self, numbers: bytes) -> None:
        """Ends at SIGTERM, collects what has ended."""
        if signal.SIGTERM in numbers:
            self.channel.is_closed = True
        self.reap()

    def on_requests(self) -> None:
        """Starts what has been asked for."""
        for request, payload in self.channel.receive():
            try:
                getattr(self, "op_" + request["op"])(request, payload)
            except OSError as error:  # no process or no pipe is to be had
                self.channel.send({"id": request["id"], "error": "start", "message": str(error)})

    def next_timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        deadlines = [child.deadline for child in self.children.values() if child.deadline is not None]
        return min(max(0.0, min(deadlines) - time.monotonic()), MAX_WAIT_S) if deadlines else None

    def expire(self) -> None:
        """Kills what is past its deadline. A command is answered for when it has been collected."""
        now = time.monotonic()
        for child in list(self.children.values()):
            if child.deadline is None or now < child.deadline:
                continue
            child.deadline = None
            child.timed_out = True
            if child.is_starting:
                self.on_started(child, "it did not start in time")
            if child.ask_id is not None:
                self.channel.send({"id": child.ask_id, "error": "timeout"})
                child.ask_id = None
            self.kill_tree(child)

    # -- operations

    def op_ping(self, request: dict[str, Any], payload: bytes) -> None:
        """Answers."""
        self.channel.send({"id": request["id"]})

    def op_exec(self, request: dict[str, Any], payload: bytes) -> None:
        """Runs `argv` with the payload as standard input."""
        argv = request["argv"]
        self.run_command(request, lambda env: replace_process(argv, env), payload)

    def op_read(self, request: dict[str, Any], payload: bytes) -> None:
        """Reads a file as the agent's user."""
        path, max_bytes = self.path(request), request["max_output_bytes"]
        self.run_command(request, lambda _: read_file(path, max_bytes))

    def op_write(self, request: dict[str, Any], payload: bytes) -> None:
        """Writes the payload to a file as the agent's user."""
        path = self.path(request)
        self.run_command(request, lambda _: write_file(path), payload)

    def op_reset(self, request: dict[str, Any], payload: bytes) -> None:
        """Kills everything, then empties the folders as the agent's user."""
        if not self.trees.kill_everything(self.reap):
            self.channel.send({"id": request["id"], "error": "start", "message": "processes survive SIGKILL"})
            return
        folders = [self.settings["work_dir"], self.settings["tmp_dir"], *self.settings.get("more_dirs", ())]
        self.run_command(request, lambda _: clean_up(folders, self.is_local))

    def op_spawn(self, request: dict[str, Any], payload: bytes) -> None:
        """Starts a line process; its key is the id of this request, which is answered when its program runs."""
        argv = request["argv"]
        child = self.start(request, lambda env: replace_process(argv, env), is_line=True)
        child.deadline = child.started + request["timeout_s"]
        self.poller.on_readable(child.fds[2], lambda: self.on_started(child))

    def on_started(self, child: Child, reason: str = "") -> None:
        """Answers for a line process whose program has taken over, or could not for `reason`."""
        reason = reason or read_some(child.fds[2]).decode("utf-8", "replace")
        child.close_fd(2)
        child.deadline = None
        error = {"error": "start", "message": reason} if reason else {}
        self.channel.send({"id": child.key, **error})

    def op_ask(self, request: dict[str, Any], payload: bytes) -> None:
        """Writes a line to a line process; the answer follows when it has written one."""
        child = self.children.get(request["key"])
        if child is None or child.timed_out or child.ask_id is not None:
            self.channel.send({"id": request["id"], "error": "gone"})
            return
        child.ask_id = request["id"]
        child.limit = request["max_reply_bytes"]
        child.num_dropped = 0
        child.deadline = time.monotonic() + request["timeout_s"]
        # Read only while a question is open: an unasked flood fills the pipe and no memory.
        self.poller.on_readable(child.fds[1], lambda: self.on_output(child, 1))
        child.write_input(payload + b"\n")
        early, child.err = bytes(child.err), bytearray()
        if early and child.take_output(1, early):
            self.answer_line(child)

    def op_kill(self, request: dict[str, Any], payload: bytes) -> None:
        """Kills the tree of a command or a line process, if it is still there."""
        child = self.children.get(request["key"])
        if child is not None:
            child.deadline = None
            self.kill_tree(child)
        self.channel.send({"id": request["id"]})

    # -- processes

    def path(self, request: dict[str, Any]) -> str:
        """The path of a request, in this box."""
        return resolve_path(self.settings["work_dir"], request["path"])

    def run_command(self, request: dict[str, Any], body: Callable[[dict[str, str]], int], stdin: bytes = b"") -> None:
        """Starts a child that is answered for when it has ended."""
        child = self.start(request, body, is_line=False)
        child.limit = request.get("max_output_bytes", READ_BYTES)
        child.oom_before = self.oom_counter.read()
        child.deadline = child.started + request["timeout_s"]
        self.poller.on_readable(child.fds[1], lambda: self.on_output(child, 1))
        self.poller.on_readable(child.fds[2], lambda: self.on_output(child, 2))
        child.write_input(stdin)

    def start(self, request: dict[str, Any], body: Callable[[dict[str, str]], int], is_line: bool) -> Child:
        """Forks a child that runs `body` as the agent's user. Raises OSError when none is to be had."""
        ends: list[int] = []
        try:
            for _ in range(3):
                ends += os.pipe()
            pid = os.fork()
        except OSError:
            for fd in ends:
                os.close(fd)
            raise
        if pid == 0:
            run_as_agent(self.settings, request, ends, body, is_line)
        for fd in (ends[0], ends[3], ends[5]):
            os.close(fd)
        child = Child(self.poller, request["id"], pid, [ends[1], ends[2], ends[4]], is_line)
        self.children[child.key] = child
        return child

    def on_output(self, child: Child, which: int) -> None:
        """Takes what a process has written; one that closes its output can never answer a line again."""
        try:
            data = os.read(child.fds[which], READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            child.close_fd(which)
            if child.is_line:
                self.kill_tree(child)
        elif child.take_output(which, data):
            self.answer_line(child)

    def answer_line(self, child: Child) -> None:
        """Answers the open question of a line process."""
        message = {"id": child.ask_id, "dropped": child.num_dropped}
        text, child.out = bytes(child.out), bytearray()
        child.ask_id = child.deadline = None
        self.poller.forget(child.fds[1])
        self.channel.send(message, text)

    def reap(self) -> None:
        """Collects every process that has ended, orphans included."""
        by_pid = {child.pid: child for child in self.children.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid:
                self.finish(by_pid[pid], status)

    def finish(self, child: Child, status: int) -> None:
        """Answers for a process that has ended, with what its pipes still hold."""
        if child.is_starting:
            self.on_started(child)
        if (not child.is_line or child.ask_id is not None) and child.drain():
            self.answer_line(child)
        for which in (0, 1, 2):
            child.close_fd(which)
        del self.children[child.key]
        if child.is_line:
            if child.ask_id is not None:
                self.channel.send({"id": child.ask_id, "error": "gone"})
            self.channel.send({"event": "ended", "key": child.key})
            return
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        answer = {
            "id": child.key,
            "exit_code": None if child.timed_out else code,
            "num_stdout": len(child.out),
            "dropped": child.num_dropped,
            "duration_s": time.monotonic() - child.started,
            "timed_out": child.timed_out,
            "oom_killed": self.oom_counter.read() > child.oom_before,
        }
        self.channel.send(answer, bytes(child.out) + bytes(child.err))

    def kill_tree(self, child: Child) -> None:
        """Kills a command and everything that came from it."""
        self.trees.kill(child.key, child.pid, {other.pid for other in self.children.values()})


def main() -> None:
    """Serves one box; the settings are the first argument."""
    Toolbox(json.loads(sys.argv[1])).run()
