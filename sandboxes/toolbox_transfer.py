"""Folders into and out of a box with a toolbox: tar archives, streamed through a child of the agent's user.

On this side an archive is a temporary file, which threads write and read; no more than a window of it is in memory.
A copy that is cancelled closes the file, and with that ends the thread that is at it.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from driftgym.errors import SandboxError
from driftgym.sandboxes.archive import ArchiveError, max_archive_bytes, pack_folder, unpack_archive
from driftgym.sandboxes.toolbox_client import Answer, ToolboxClient

_PART_BYTES = 256 * 1024
_WINDOW_BYTES = 1024 * 1024
_T = TypeVar("_T")


async def send_folder(client: ToolboxClient, local: Path, path: str, *, timeout_s: float) -> Answer:
    """Fills the folder `path` of the box with what `local` holds; the answer of the child that wrote it.

    Raises:
        NotADirectoryError: `local` is no folder.
        OSError: it cannot be read.
        SandboxError: the box is gone, or `timeout_s` is over.
    """
    with tempfile.TemporaryFile() as archive:
        await in_time(asyncio.to_thread(pack_folder, local, archive), timeout_s)
        await asyncio.to_thread(archive.seek, 0)
        return await client.call("upload", _content(archive), timeout_s=timeout_s, path=path, cwd="/")


async def _content(archive: IO[bytes]) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(archive.read, _PART_BYTES):
        yield data


async def receive_folder(
    client: ToolboxClient,
    path: str,
    local: Path,
    *,
    max_bytes: int,
    max_files: int,
    timeout_s: float,
    check: Callable[[Answer], None],
) -> None:
    """Fills the folder `local`, which is made, with what the folder `path` of the box holds.

    `check` raises what the answer of the child that read it means, before anything is written.

    Raises:
        ValueError: it holds more than `max_bytes` or `max_files`.
        OSError: `local` cannot be written.
        SandboxError: the box is gone, or sent no archive, or `timeout_s` is over.
    """
    with tempfile.TemporaryFile() as archive:
        arrived: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        writing = asyncio.ensure_future(_write(client, arrived, archive))
        calling = asyncio.ensure_future(
            client.call(
                "download",
                timeout_s=timeout_s,
                on_output=lambda key, data: arrived.put_nowait((key, data)),
                path=path,
                cwd="/",
                window=_WINDOW_BYTES,
                max_output_bytes=max_archive_bytes(max_bytes=max_bytes, max_files=max_files),
                max_bytes=max_bytes,
                max_files=max_files,
            )
        )
        try:
            await asyncio.wait({writing, calling}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            answer = await calling
            arrived.put_nowait((0, answer.payload[: answer.fields["num_stdout"]]))
            await writing
        finally:
            await _end(calling, writing)
        check(answer)
        unpacking = asyncio.to_thread(_unpack, archive, local, max_bytes=max_bytes, max_files=max_files)
        await in_time(unpacking, timeout_s)


async def in_time(work: Awaitable[_T], timeout_s: float) -> _T:
    """Waits for work in a thread, which is left alone when it is late. Raises SandboxError then."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise SandboxError(f"the copy did not end within {timeout_s:g} s") from None


async def _write(client: ToolboxClient, arrived: "asyncio.Queue[tuple[int, bytes]]", archive: IO[bytes]) -> None:
    """Writes what has arrived, in threads, and lets the box send as much again; the key 0 is the end."""
    while True:
        key, data = await arrived.get()
        await asyncio.to_thread(archive.write, data)
        if not key:
            return
        client.give_credit(key, len(data))


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _unpack(archive: IO[bytes], local: Path, *, max_bytes: int, max_files: int) -> None:
    archive.seek(0)
    try:
        unpack_archive(archive, local, max_bytes=max_bytes, max_files=max_files)
    except ArchiveError as error:
        raise SandboxError(str(error)) from None
