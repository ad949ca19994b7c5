"""The box's end of egress: takes connections on 127.0.0.1 and carries their bytes over the toolbox's own stream.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later. It decides nothing: what is asked
for, whether it may be, and the connection out are the owner's (`egress`).

From the box come `{"event": E, "conn": n}`, to the box `{"op": E, "conn": n}`, n counting from 1, where E is

    relay_open    a program has connected (from the box alone)
    relay_data    the payload is its next bytes, or the next ones for it
    relay_eof     no more bytes come from this side; the other may go on
    relay_credit  `num_bytes` more may be sent; with n = 0, over all connections together
    relay_close   the connection is gone, and what was under way with it

Each side sends at most `WINDOW_BYTES` of a connection, and `TOTAL_WINDOW_BYTES` of all together, ahead of the credit.
The first is given back when the bytes have been passed on: a connection that stalls holds up itself alone. The
second is given back on arrival: answers of commands wait behind few bytes.
"""

from __future__ import annotations

import socket

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any

    from driftgym.sandboxes.toolbox_io import Channel, Poller

WINDOW_BYTES = 64 * 1024
TOTAL_WINDOW_BYTES = 192 * 1024
"""Less than makes the channel full, past which no command's output is taken."""
CHUNK_BYTES = 32 * 1024
SOCKET_BYTES = 128 * 1024
NO_DESCRIPTOR = (23, 24, 105, 12)
"""ENFILE, EMFILE, ENOBUFS, ENOMEM: another try fails at once too."""
MAX_CONNECTIONS = 128
"""Further connections wait to be taken until one has ended."""


class Connection:
    """A program's connection. Reading and writing are waited for apart, hence two descriptors."""

    def __init__(self, number: int, reader: socket.socket, writer: socket.socket) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.credit = WINDOW_BYTES  # that may still be sent to the owner
        self.num_passed_on = 0  # that the owner has not been given credit for
        self.pending = bytearray()  # for the program
        self.is_read = False  # waited for
        self.has_ended = False  # the program sends no more
        self.owner_has_ended = False


class Relay:
    """Takes connections, and moves bytes both ways as far as credit goes."""

    def __init__(self, poller: Poller, channel: Channel, *, port: int) -> None:
        self.poller = poller
        self.channel = channel
        self.connections: dict[int, Connection] = {}
        self.starved: dict[int, Connection] = {}  # those that have something to send, the longest first
        self.credit = TOTAL_WINDOW_BYTES
        self.num_arrived = 0  # that the owner has not been given credit for
        self.last_number = 0
        self.is_listening = False
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # of the connections: else megabytes of each that stalls
            self.listener.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(MAX_CONNECTIONS)
        self.listener.setblocking(False)
        self.spare = self.listener.dup()
        self.listen()

    def listen(self) -> None:
        """Waits for connections, unless there are as many as may be."""
        if not self.is_listening and len(self.connections) < MAX_CONNECTIONS:
            self.is_listening = True
            self.poller.on_readable(self.listener.fileno(), self.on_connection)

    def on_connection(self) -> None:
        """Takes one connection; they are waited for no longer when there are as many as may be, or descriptors."""
        try:
            reader = self.listener.accept()[0]
        except OSError as error:  # it is gone already, or there is no descriptor for it
            if error.errno in NO_DESCRIPTOR:
                self.rest()
            return
        try:
            writer = reader.dup()
        except OSError:
            reader.close()
            self.rest()
            return
        reader.setblocking(False)
        writer.setblocking(False)
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last_number += 1
        connection = Connection(self.last_number, reader, writer)
        self.connections[connection.number] = connection
        self.say("relay_open", connection)
        self.resume(connection)
        if len(self.connections) >= MAX_CONNECTIONS:
            self.rest()

    def rest(self) -> None:
        """Takes no connection until one has ended: those that wait would wake it without end. Where there is none to
        end, the one that waits is refused with the descriptor that is kept for it."""
        if self.connections:
            self.is_listening = False
            self.poller.forget(self.listener.fileno())
            return
        self.spare.close()
        try:  # noqa: SIM105 (contextlib costs milliseconds at each start)
            self.listener.accept()[0].close()
        except OSError:  # it is gone already
            pass
        try:  # noqa: SIM105
            self.spare = self.listener.dup()
        except OSError:  # the machine has none left; the next one that waits has another try
            pass

    def say(self, event: str, connection: Connection, payload: bytes = b"", **fields: int) -> None:
        """Tells the owner."""
        self.channel.send({"event": event, "conn": connection.number, **fields}, payload)

    # -- from the program

    def resume(self, connection: Connection) -> None:
        """Waits for the program's bytes where there is credit for some."""
        if connection.is_read or connection.has_ended or not connection.credit:
            return
        if not self.credit:
            self.starved[connection.number] = connection
            return
        connection.is_read = True
        self.poller.on_readable(connection.reader.fileno(), lambda: self.on_bytes(connection))

    def pause(self, connection: Connection) -> None:
        """Waits for them no longer."""
        connection.is_read = False
        self.poller.forget(connection.reader.fileno())

    def on_bytes(self, connection: Connection) -> None:
        """Sends on what a program has written."""
        num_bytes = min(CHUNK_BYTES, connection.credit, self.credit)
        if not num_bytes:
            self.pause(connection)
            self.resume(connection)
            return
        try:
            data = connection.reader.recv(num_bytes)
        except BlockingIOError:
            return
        except OSError:
            self.close(connection)
            return
        if data:
            connection.credit -= len(data)
            self.credit -= len(data)
            self.say("relay_data", connection, data)
            if not connection.credit:
                self.pause(connection)
            return
        connection.has_ended = True
        self.pause(connection)
        self.say("relay_eof", connection)
        self.close_if_over(connection)

    # -- from the owner

    def on_request(self, request: dict[str, Any], payload: bytes) -> None:
        """Takes what the owner says. A connection that has ended meanwhile is no error."""
        op = request["op"]
        if op == "relay_data":
            self.count_arrived(len(payload))
        if op == "relay_credit" and request["conn"] == 0:
            self.credit += request["num_bytes"]
            starved, self.starved = self.starved, {}
            for waiting in starved.values():
                self.resume(waiting)
            return
        connection = self.connections.get(request["conn"])
        if connection is None:
            return
        if op == "relay_data":
            connection.pending += payload
            self.pass_on(connection)
        elif op == "relay_credit":
            connection.credit += request["num_bytes"]
            self.resume(connection)
        elif op == "relay_eof":
            connection.owner_has_ended = True
            self.pass_on(connection)
        else:
            self.close(connection)

    def count_arrived(self, num_bytes: int) -> None:
        """Gives the owner credit over all connections for what has arrived."""
        self.num_arrived += num_bytes
        if self.num_arrived >= TOTAL_WINDOW_BYTES // 2:
            self.channel.send({"event": "relay_credit", "conn": 0, "num_bytes": self.num_arrived})
            self.num_arrived = 0

    def pass_on(self, connection: Connection) -> None:
        """Writes to the program what it takes, and gives credit for it."""
        try:
            num_written = connection.writer.send(connection.pending) if connection.pending else 0
        except BlockingIOError:
            num_written = 0
        except OSError:
            self.close(connection)
            return
        del connection.pending[:num_written]
        connection.num_passed_on += num_written
        if connection.num_passed_on >= WINDOW_BYTES // 2:
            self.say("relay_credit", connection, num_bytes=connection.num_passed_on)
            connection.num_passed_on = 0
        if connection.pending:
            self.poller.on_writable(connection.writer.fileno(), lambda: self.pass_on(connection))
            return
        self.poller.forget(connection.writer.fileno())
        if connection.owner_has_ended:
            self.end_output(connection)

    def end_output(self, connection: Connection) -> None:
        """Lets the program see the end."""
        try:
            connection.writer.shutdown(socket.SHUT_WR)
        except OSError:
            self.close(connection)
            return
        self.close_if_over(connection)

    # -- the end

    def close_if_over(self, connection: Connection) -> None:
        """Closes a connection that both sides have ended, once the program has all of it."""
        if connection.has_ended and connection.owner_has_ended and not connection.pending:
            self.close(connection)

    def close(self, connection: Connection) -> None:
        """Ends a connection and tells the owner; nothing happens when that is done."""
        if self.connections.pop(connection.number, None) is None:
            return
        self.starved.pop(connection.number, None)
        for end in (connection.reader, connection.writer):
            # Shut down, not closed alone: a child that the toolbox has forked may hold it too.
            self.poller.forget(end.fileno())
            try:  # noqa: SIM105 (contextlib costs milliseconds at each start)
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
        self.say("relay_close", connection)
        self.listen()

    def close_all(self) -> None:
        """Ends all connections, those that wait to be taken too: whoever made them has been killed."""
        for connection in list(self.connections.values()):
            self.close(connection)
        while True:
            try:
                self.listener.accept()[0].close()
            except OSError:
                return
