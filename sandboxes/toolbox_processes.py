"""The toolbox's processes: starts them, takes their output, collects them, answers for them.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import os
import time

from driftgym.sandboxes.toolbox_child import Forker
from driftgym.sandboxes.toolbox_files import what_is_left
from driftgym.sandboxes.toolbox_io import PART_BYTES, Channel, Child, Poller, Record
from driftgym.sandboxes.toolbox_system import READ_BYTES, OomCounter, ProcessTrees, read_some, signal

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any

SPARE_DELAY_S = 0.005
"""Children are forked ahead when there is nothing else to do: so long after an answer, or into a command."""
SPARE_PAUSE_S = 0.5
"""How long after no process was to be had."""


class Processes:
    """What the toolbox has started and not yet answered for."""

    def __init__(self, settings: dict[str, Any], poller: Poller, channel: Channel, record: Record) -> None:
        self.settings = settings
        self.is_local = bool(settings.get("is_local"))
        self.poller = poller
        self.channel = channel
        self.record = record
        self.children: dict[int, Child] = {}
        self.paused: list[tuple[Child, int]] = []  # which outputs are not read from, for want of room or credit
        self.forker = Forker(settings)
        self.spare_at = 0.0  # when a child is to be forked ahead, if there are too few
        self.trees = ProcessTrees(self.is_local, settings.get("box_tag", ""), lambda: self.forker.spares)
        self.oom_counter = OomCounter(self.is_local)
        channel.on_room = self.resume

    # -- time

    def times(self) -> list[float]:
        """When there will be something to do."""
        times = [child.deadline for child in self.children.values() if child.deadline is not None]
        return times if self.forker.is_full else [*times, self.spare_at]

    def prepare_spares(self) -> None:
        """Forks the children ahead that lack, when it is time to: what the toolbox writes to is copied once for all."""
        if self.forker.is_full or time.monotonic() < self.spare_at:
            return
        while not self.forker.is_full:
            if not self.forker.prepare():
                self.spare_at = time.monotonic() + SPARE_PAUSE_S
                return

    def expire(self, now: float) -> None:
        """Kills what is past its deadline. A command is answered for when it has been collected."""
        for child in list(self.children.values()):
            if child.deadline is None or now < child.deadline:
                continue
            child.deadline = None
            child.timed_out = True
            if child.is_starting:
                self.on_started(child, "it did not start in time")
            if child.ask_id is not None:
                self.record.answer(child.ask_id, {"error": "timeout"})
                child.ask_id = None
            self.kill_tree(child)

    # -- beginning

    def start(self, request: dict[str, Any], is_line: bool) -> Child:
        """A child that does what is asked as the agent's user. Raises OSError when none is to be had."""
        self.tell_oom([])
        pid, fds = self.forker.start(request["text"])
        # The last one ahead is followed while its command runs: of many requests in a row, one pays for some.
        self.spare_at = time.monotonic() + (SPARE_DELAY_S if self.forker.spares else 0.0)
        child = Child(self.poller, request["id"], pid, fds, is_line)
        self.children[child.key] = child
        return child

    def on_started(self, child: Child, reason: str = "") -> None:
        """Answers for a line process whose program has taken over, or could not for `reason`."""
        reason = reason or read_some(child.fds[2]).decode("utf-8", "replace")
        child.close_fd(2)
        child.deadline = None
        self.record.answer(child.key, {"error": "start", "message": reason} if reason else {})

    # -- output

    def listen(self, child: Child, which: int) -> None:
        """Reads an output of a process."""
        self.poller.on_readable(child.fds[which], lambda: self.on_output(child, which))

    def on_output(self, child: Child, which: int) -> None:
        """Takes what a process has written; one that closes its output can never answer a line again."""
        if self.channel.is_full or (child.window is not None and child.window <= 0):
            self.poller.forget(child.fds[which])
            self.paused.append((child, which))
            return
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
        else:
            self.send_on(child, which)

    def resume(self) -> None:
        """Reads from all processes again; those that may not go on pause at once."""
        paused, self.paused = self.paused, []
        for child, which in paused:
            is_wanted = not child.is_line or child.ask_id is not None
            if is_wanted and child.fds[which] >= 0 and child.fds[which] not in self.poller.handlers:
                self.listen(child, which)

    def send_on(self, child: Child, which: int) -> None:
        """Sends what has come of an answer, once it is much."""
        if len(child.outputs[which].kept) < PART_BYTES:
            return
        data = child.outputs[which].release()
        if child.window is not None:
            child.window -= len(data)
        self.record.send_part(child.key if child.ask_id is None else child.ask_id, which, data)

    def answer_line(self, child: Child) -> None:
        """Answers the open question of a line process."""
        assert child.ask_id is not None
        ask_id, child.ask_id, child.deadline = child.ask_id, None, None
        self.poller.forget(child.fds[1])
        output = child.outputs[1]
        self.record.answer(ask_id, {"dropped": output.num_dropped}, output.release())

    # -- end

    def reap(self) -> None:
        """Collects every process that has ended, orphans included."""
        by_pid = {child.pid: child for child in self.children.values()}
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in by_pid:
                ended.append((by_pid[pid], status))
            elif pid in self.forker.spares:
                self.forker.forget(pid)
        self.tell_oom(ended)
        for child, status in ended:
            self.finish(child, status)

    def tell_oom(self, ended: list[tuple[Child, int]]) -> None:
        """Marks the commands that the memory limit has struck since this was done last.

        The kernel counts for the whole box. So many as were killed themselves explain so many counts. What is left
        over struck a process within a tree, or in the background: that is told of every command that was running.
        """
        num_new = self.oom_counter.num_new()
        if not num_new:
            return
        struck = [child for child, status in ended if status & 0x7F == signal.SIGKILL and not child.was_killed]
        for child in struck if num_new <= len(struck) else self.children.values():
            child.oom_killed = True

    def finish(self, child: Child, status: int) -> None:
        """Answers for a process that has ended, with what its pipes still hold."""
        if child.is_starting:
            self.on_started(child)
        if (not child.is_line or child.ask_id is not None) and child.drain(self.send_on):
            self.answer_line(child)
        for which in (0, 1, 2):
            child.close_fd(which)
        del self.children[child.key]
        self.spare_at = time.monotonic() + (SPARE_DELAY_S if self.forker.spares else 0.0)
        if child.is_line:
            if child.ask_id is not None:
                self.record.answer(child.ask_id, {"error": "gone"})
            self.channel.send({"event": "ended", "key": child.key})
            return
        self.answer_command(child, -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))

    def answer_command(self, child: Child, code: int) -> None:
        """Answers for a command with its exit code."""
        stdout, stderr = child.outputs[1].release(), child.outputs[2].release()
        if child.is_reset and code == 0:
            left = what_is_left(self.settings["roots"], self.is_local)
            if not self.trees.is_alone():
                left = "there are new processes"
            code, stderr = (1, left.encode()) if left else (0, b"")
        answer = {
            "exit_code": None if child.timed_out else code,
            "num_stdout": len(stdout),
            "dropped": child.outputs[1].num_dropped + child.outputs[2].num_dropped,
            "duration_s": time.monotonic() - child.started,
            "timed_out": child.timed_out,
            "oom_killed": child.oom_killed,
        }
        self.record.answer(child.key, answer, stdout + stderr)

    def kill_tree(self, child: Child) -> None:
        """Kills a command and everything that came from it."""
        child.was_killed = True
        self.trees.kill(child.key, child.pid, {*self.forker.spares, *(other.pid for other in self.children.values())})

    def kill_everything(self, is_for_sure: bool) -> bool:
        """Kills every process of the box but the toolbox; false when some survive.

        `is_for_sure` takes the spares along, so that the kernel itself can say that nothing else is there.
        """
        if is_for_sure:
            self.forker.drop()
            self.spare_at = time.monotonic()
        is_clean = self.trees.kill_everything(self.reap, lambda: self.forker.forget(*self.forker.spares))
        return is_clean and (not is_for_sure or self.trees.is_alone())
