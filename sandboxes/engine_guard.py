"""The main process of a box whose image holds no Python: a shell script, and what its owner says to it.

Once it serves, the script starts no process (it needs the shell's own commands alone), so that it can kill also where
no process is to be had. It runs as root with SETUID, SETGID and KILL; it ends, and the box with it, when its standard
input does, or when nothing comes over it for `dead_man_s` where the shell's `read` has a deadline (busybox, bash, mksh;
not dash).

How a process tree is found: each command has a primary group of its own, its tag, which a process without capabilities
cannot change and its descendants inherit, also when they daemonise.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from driftgym.errors import SandboxError

_ANSWER_TIMEOUT_S = 30.0
_NUM_BEATS = 4
"""How many signs of life the owner gives in `dead_man_s`."""
_MAX_LINE_BYTES = 4096

GUARD_SCRIPT = r"""
limit=
read -t 1 n 2>/dev/null </dev/null
[ $? -lt 2 ] && limit="-t $1"
shift
chmod 1777 "$@" 2>/dev/null  # some engines give a tmpfs the permissions of the folder that it covers
group_of() {
  group=
  while read -r key value rest; do
    case $key in Gid:) group=$value; break;; esac
  done 2>/dev/null <"/proc/$1/status"
}
kill_group() {
  stopped=" "; count=0; quiet=0; round=0
  while [ $quiet -lt 2 ] && [ $round -lt 100 ]; do
    quiet=$((quiet+1)); round=$((round+1))
    for pid in /proc/[0-9]*; do
      pid=${pid#/proc/}
      case $stopped in *" $pid "*) continue;; esac
      group_of $pid
      [ "$group" = "$1" ] || continue
      kill -STOP $pid 2>/dev/null
      stopped="$stopped$pid "; count=$((count+1)); quiet=0
    done
  done
  for pid in $stopped; do
    group_of $pid
    [ "$group" = "$1" ] && kill -KILL $pid 2>/dev/null
  done
}
kill_all() {
  kill -KILL -1 2>/dev/null
  count=0
  for pid in /proc/[0-9]*; do
    case $pid in /proc/1|/proc/$$) ;; *) count=$((count+1));; esac
  done
}
count_oom() {
  count=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    while read -r key value; do
      [ "$key" = oom_kill ] && count=$value
    done 2>/dev/null <$file
  done
}
while read $limit -r id op tag; do
  count=0
  case $op in
    kill) kill_group $tag;;
    all) kill_all;;
    oom) count_oom;;
  esac
  echo "$id $count"
done
"""


def guard_command(*, dead_man_s: float, folders: Sequence[str]) -> list[str]:
    """The argv of the main process; everybody may write in `folders`."""
    return ["/bin/sh", "-c", GUARD_SCRIPT, "guard", str(max(1, math.ceil(dead_man_s))), *folders]


class Guard:
    """Questions to the main process, each answered with a number. They wait for each other in the box.

    Consumes what `feed` is given; every wait has a deadline, and ends with `lose`. Signs of life are given by the event
    loop from `start` on: an owner whose loop stands still is taken for dead.
    """

    def __init__(self, *, name: str, write: Callable[[bytes], None], dead_man_s: float) -> None:
        self.name = name
        self._write = write
        self._pause_s = dead_man_s / _NUM_BEATS
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._next_id = 1
        self._beat: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Ends with the reason when the box is gone. Never cancelled: wait for it with `asyncio.wait`."""

    async def start(self) -> None:
        """Waits for the first answer. The caller sets the deadline. Raises SandboxError when the box is lost."""
        self._give_sign()
        await self.ask("ping", timeout_s=math.inf)

    def _give_sign(self) -> None:
        self._write(b"0 beat\n")
        self._beat = self._loop.call_later(self._pause_s, self._give_sign)

    def check(self) -> None:
        """Raises SandboxError when the box is gone."""
        if self.lost.done():
            raise SandboxError(f"{self.name}: {self.lost.result()}")

    async def ask(self, op: str, tag: int = 0, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> int:
        """The answer to one question.

        `ping` gives 0; `kill` kills the processes of a tag, and gives how many it found; `all` kills every process,
        and gives how many are still there; `oom` gives how many the memory limit has killed so far.

        Raises:
            SandboxError: the box is gone, or does not answer in time and is lost therefore.
        """
        self.check()
        request_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[int] = self._loop.create_future()
        self._waiting[request_id] = answer
        try:
            self._write(f"{request_id} {op} {tag}\n".encode())
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self.lose(f"no answer to {op} within {timeout_s:g} s")
            raise SandboxError(f"{self.name}: {self.lost.result()}") from None
        finally:
            self._waiting.pop(request_id, None)

    def feed(self, data: bytes) -> None:
        """Takes what the main process has written. Nonsense loses the box, and never raises."""
        if self.lost.done():  # kept, it would be without bound
            return
        self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        try:
            for line in lines:
                self._take(*map(int, line.split()))
            if len(rest) > _MAX_LINE_BYTES:
                raise ValueError("a line without end")
        except (ValueError, TypeError) as error:
            self.lose(f"what answers is no guard: {error}")

    def _take(self, request_id: int, count: int) -> None:
        answer = self._waiting.get(request_id)
        if answer is not None and not answer.done():
            answer.set_result(count)

    def lose(self, reason: str) -> None:
        """Ends every wait with SandboxError: the box is gone for `reason`. The first reason counts."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._beat is not None:
            self._beat.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(f"{self.name}: {reason}"))

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Has `callback` called soon after the box is lost."""
        self.lost.add_done_callback(partial(_call, callback))


def _call(callback: Callable[[], None], _: object) -> None:
    callback()
