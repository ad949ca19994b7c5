"""Line processes of the engine's exec, on an engine that the test plays."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from driftgym.sandboxes.docker_engine import Engine
from driftgym.sandboxes.engine_exec import Command, Runner
from driftgym.sandboxes.engine_guard import Guard
from driftgym.sandboxes.engine_process import EngineProcess

PIECE_BYTES = 32 * 1024
NUM_LOOKS = 8


class FloodingEngine:
    """An engine whose command writes without end, long before the engine says that it runs."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """What was taken from it."""
        self.num_looks = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request."""
        head = await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            if b"/exec/1f/start" in head:
                await self._flood(writer)
            else:
                self.num_looks += b"/exec/1f/json" in head
                pid = 5 if self.num_looks > NUM_LOOKS else 0
                answer: dict[str, Any] = {"Id": "1f", "Running": True, "ExitCode": None, "Pid": pid}
                writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(answer).encode())
        writer.close()

    async def _flood(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 UPGRADED\r\n\r\n")
        while True:
            writer.write(struct.pack(">BxxxL", 1, PIECE_BYTES) + b"yes\n" * (PIECE_BYTES // 4))
            await writer.drain()
            self.num_bytes += PIECE_BYTES


@contextlib.asynccontextmanager
async def flooded(folder: Path) -> AsyncIterator[tuple[FloodingEngine, Engine]]:
    played = FloodingEngine()
    path = str(folder / "engine.sock")
    async with await asyncio.start_unix_server(played.serve, path):
        yield played, Engine(api=contextlib.nullcontext(), socket_path=path, version="1.41")


async def test_flood_before_the_first_question_is_not_kept(tmp_path: Path) -> None:
    async with flooded(tmp_path) as (played, engine):
        guard = Guard(name="box", write=lambda data: None, dead_man_s=60)
        process = EngineProcess(runner=Runner(engine=engine, container_id="2e", uid=1000, guard=guard), guard=guard)
        await process.start(Command.checked(["yes"], cwd="/", env={}))
        assert played.num_looks > NUM_LOOKS
        assert played.num_bytes < 2_000_000
        for _ in range(3):
            assert (await process.ask("", timeout_s=60)).text == "yes"
        guard.lose("closed")
        process.mark_ended()
        await asyncio.sleep(0.05)
