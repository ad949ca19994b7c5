"""The server inside the box: runs commands, answers many calls at once, kills process trees.

This file and the other `toolbox_` ones that it imports use the standard library only and any Python from 3.8 on that
the image holds: they come in with the box (`toolbox_program`) and nothing is installed. The one argument is a JSON
object:

    uid, gid    the user that commands run as; null keeps the toolbox's own user (a local box, trusted code)
    root_capabilities  where uid is 0: the numbers of the capabilities that commands keep, of those the toolbox has
    is_root_writable  whether files outside of the folders below can be changed
    work_dir    what "/work" means in a path
    tmp_dir     where temporary files go
    more_dirs   further folders that `reset` empties
    egress_port where the relay listens on 127.0.0.1 for commands' HTTP; null or absent without one
    dead_man_s  the box ends when its owner has said nothing for so long; null or absent: only with its input
    limits      {"nofile": n, "fsize": n, "data": n}: resource limits of every command; each may be absent
    num_spares  how many children are kept forked ahead; one when absent
    is_local    true for a local child: it adopts orphans, to find them again, and removes its folders at the end
    box_tag     of a local box: what its processes are known by, should the toolbox be killed; ends in "-"

A request has an `id`, which counts upwards, and an `op`; its answer has the same `id`. One that is asked again is not
run again (`Record`). Unasked comes `{"event": "ready" | "ended", ...}`. What is long goes in parts: input that is not
whole (`more`) goes on in `{"op": "input", "key": id}` frames until one has `end`, as far as
`{"event": "credit", "key": id, "num_bytes": n}` lets it; output leaves early in `{"event": "part", "id": id}` frames,
and for a request with a `window` only so far ahead of `{"op": "credit", "key": id, "num_bytes": n}`. While the client
takes nothing, no process is read from. `{"op": "beat"}` says that the owner lives. The end of standard input is the
end of the box. One thread and no polling: everything waits in one epoll.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from driftgym.sandboxes.toolbox_files import describe_roots, empty_folder, open_folders
from driftgym.sandboxes.toolbox_filter import install_filter
from driftgym.sandboxes.toolbox_io import Channel, Poller, Record
from driftgym.sandboxes.toolbox_processes import Processes
from driftgym.sandboxes.toolbox_system import READ_BYTES, read_some, signal
from driftgym.sandboxes.toolbox_wire import decode

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any

MAX_WAIT_S = 3600.0
"""The kernel takes no wait of many days; a deadline may be that far, or infinite."""


class Toolbox:
    """The event loop: requests in, processes, answers out."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.is_local = bool(settings.get("is_local"))
        folders = [settings["work_dir"], settings["tmp_dir"], *settings.get("more_dirs", ())]
        settings["roots"] = describe_roots(folders)
        self.poller = Poller()
        self.channel = Channel(self.poller)
        self.record = Record(self.channel)
        self.relay: Any = None  # egress, where the box has one
        self.processes = Processes(settings, self.poller, self.channel, self.record)

    def run(self) -> None:
        """Serves until standard input ends, or SIGTERM; then nothing that it started is left."""
        self.watch_signals()
        self.poller.on_readable(0, self.on_requests)
        port = self.settings.get("egress_port")
        if port is not None:
            from driftgym.sandboxes.toolbox_relay import Relay

            self.relay = Relay(self.poller, self.channel, port=port)
        self.channel.send({"event": "ready", "python": sys.version.split()[0]})
        gc.freeze()  # a collection would write to what children share
        while not self.channel.is_closed:
            self.processes.prepare_spares()
            self.poller.wait(self.next_timeout())
            self.expire()
        self.processes.kill_everything(is_for_sure=True)
        if self.is_local:
            for folder in (self.settings["tmp_dir"], self.settings["work_dir"]):
                empty_folder(folder, os.geteuid())
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
        self.processes.reap()

    def on_requests(self) -> None:
        """Starts what has been asked for."""
        try:
            for request, payload, text in self.channel.receive():
                self.on_request(request, payload, text)
        except ValueError as error:
            sys.stderr.write(f"what asks is no owner: {error}")
            self.channel.is_closed = True

    def on_request(self, request: dict[str, Any], payload: bytes, text: bytes) -> None:
        """Starts one request, unless it is known already."""
        op = request["op"]
        if op.startswith("relay_"):
            if self.relay is not None:
                self.relay.on_request(request, payload)
        elif "id" not in request:
            getattr(self, "take_" + op, self.take_beat)(request, payload)
        elif self.record.begin(request["id"]):
            request["text"] = text
            try:
                getattr(self, "op_" + op, self.op_unknown)(request, payload)
            except OSError as error:  # no process or no pipe is to be had
                self.record.answer(request["id"], {"error": "start", "message": str(error)})

    # -- time

    def next_timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        times = self.processes.times()
        if self.settings.get("dead_man_s") is not None:
            times.append(self.channel.heard + self.settings["dead_man_s"])
        return min(max(0.0, min(times) - time.monotonic()), MAX_WAIT_S) if times else None

    def expire(self) -> None:
        """Kills what is past its deadline. A command is answered for when it has been collected."""
        now = time.monotonic()
        if self.settings.get("dead_man_s") is not None and now >= self.channel.heard + self.settings["dead_man_s"]:
            sys.stderr.write("the owner of the box has fallen silent")
            self.channel.is_closed = True
            return
        self.processes.expire(now)

    # -- operations without an answer

    def take_beat(self, request: dict[str, Any], payload: bytes) -> None:
        """Nothing: that something came is all that counts, also where it is not known."""

    def take_input(self, request: dict[str, Any], payload: bytes) -> None:
        """Goes on with the input of a command, if it is still there."""
        child = self.processes.children.get(request["key"])
        if child is not None:
            child.write_input(payload, is_whole=bool(request.get("end")))

    def take_credit(self, request: dict[str, Any], payload: bytes) -> None:
        """Lets more of a command's output leave."""
        child = self.processes.children.get(request["key"])
        if child is not None and child.window is not None:
            child.window += request["num_bytes"]
            self.processes.resume()

    # -- operations

    def op_unknown(self, request: dict[str, Any], payload: bytes) -> None:
        """Refuses."""
        self.record.answer(request["id"], {"error": "start", "message": f"there is no operation {request['op']}"})

    def op_ping(self, request: dict[str, Any], payload: bytes) -> None:
        """Answers."""
        self.record.answer(request["id"], {})

    def op_exec(self, request: dict[str, Any], payload: bytes) -> None:
        """Starts a child that does what is asked, with the payload as its standard input; answers when it ends."""
        child = self.processes.start(request, is_line=False)
        for output in child.outputs.values():
            output.restart(request.get("max_output_bytes", READ_BYTES))
        child.window = request.get("window")
        child.deadline = child.started + request["timeout_s"]
        self.processes.listen(child, 1)
        self.processes.listen(child, 2)
        if request.get("more"):
            child.on_input_taken = lambda num_bytes: self.give_credit(child.key, num_bytes)
        child.write_input(payload, is_whole=not request.get("more"))

    op_read = op_write = op_upload = op_download = op_exec

    def give_credit(self, key: int, num_bytes: int) -> None:
        """Lets the client go on with an input; -1 tells that nothing takes it any more."""
        self.channel.send({"event": "credit", "key": key, "num_bytes": num_bytes})

    def op_reset(self, request: dict[str, Any], payload: bytes) -> None:
        """Kills everything, then has the folders emptied, and looks whether that is so."""
        if self.relay is not None:
            self.relay.close_all()
        if not self.processes.kill_everything(is_for_sure=request["keep_files"]):
            self.record.answer(request["id"], {"error": "start", "message": "processes survive SIGKILL"})
        elif request["keep_files"]:
            self.record.answer(request["id"], {"exit_code": 0, "num_stdout": 0})
        else:
            self.op_exec(request, payload)
            self.processes.children[request["id"]].is_reset = True

    def op_spawn(self, request: dict[str, Any], payload: bytes) -> None:
        """Starts a line process; its key is the id of this request, which is answered when its program runs."""
        child = self.processes.start(request, is_line=True)
        child.deadline = child.started + request["timeout_s"]
        self.poller.on_readable(child.fds[2], lambda: self.processes.on_started(child))

    def op_ask(self, request: dict[str, Any], payload: bytes) -> None:
        """Writes a line to a line process; the answer follows when it has written one."""
        child = self.processes.children.get(request["key"])
        if child is None or child.timed_out or child.ask_id is not None:
            self.record.answer(request["id"], {"error": "gone"})
            return
        child.ask_id = request["id"]
        child.outputs[1].restart(request["max_reply_bytes"])
        child.deadline = time.monotonic() + request["timeout_s"]
        # Read only while a question is open: an unasked flood fills the pipe and no memory.
        self.processes.listen(child, 1)
        child.write_input(payload + b"\n")
        early, child.early = child.early, b""
        if early and child.take_output(1, early):
            self.processes.answer_line(child)

    def op_kill(self, request: dict[str, Any], payload: bytes) -> None:
        """Kills the tree of a command or a line process, if it is still there."""
        child = self.processes.children.get(request["key"])
        if child is not None:
            child.deadline = None
            self.processes.kill_tree(child)
        self.record.answer(request["id"], {})


def main() -> None:
    """Serves one box; the settings are the first argument."""
    settings = decode(sys.argv[1].encode())
    if not settings.get("is_local"):
        install_filter()
        open_folders(settings)
    Toolbox(settings).run()
