"""Folders as tar archives, on the owner's side: packs a folder of this machine, unpacks what a box has sent.

What comes from a box is hostile until it is shown not to be: the reader here knows the few kinds of entries that tar
programs write for files, folders and links, holds nothing but small headers in memory, and follows no link. Everything
blocks: call it in a thread, on a temporary file between the box and the folder.
"""

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from driftgym.errors import SandboxError

_BLOCK_BYTES = 512
_COPY_BYTES = 256 * 1024
_MAX_HEADER_BYTES = 64 * 1024
"""A long name, or the extended header of an entry."""
_MAX_ENTRY_OVERHEAD_BYTES = 12 * 1024
"""Headers of an entry with the longest names that the kernel takes, and the padding of its content."""
_MAX_RECORD_BYTES = 1024 * 1024
"""What tar programs fill the end of an archive up to, generously."""
_MAX_DEPTH = 200
"""Folders within folders: what removes a tree, as `shutil.rmtree`, may call itself once for each."""
_FILE_MODE = 0o644
_FOLDER_MODE = 0o755
_FILE_KINDS = (b"0", b"\0", b"7")
_KNOWN_RECORDS = (b"path", b"linkpath", b"size")
_SPARSE = b"GNU.sparse"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveError(SandboxError):
    """What should be an archive is none, or ends before its end: the box did not send it whole."""


class Readable(Protocol):
    """What an archive is read from: a file, a pipe."""

    def read(self, num_bytes: int, /) -> bytes:
        """At most `num_bytes`; fewer than that, and none, only where the archive ends."""
        ...


# -- packing


def pack_folder(local: Path, archive: IO[bytes]) -> dict[str, int]:
    """Writes the content of a folder as an archive: files, folders and symbolic links, with their permissions.

    Whatever else is there is left out. A folder that its owner may not write comes twice, with its own permissions the
    second time, so that it can be filled when it is unpacked by somebody who is not root. The result says which ones
    these are and what their permissions are, each after those in it, for programs that leave a folder as it is.

    Raises:
        NotADirectoryError: `local` is no folder.
        OSError: it cannot be read, or `archive` cannot be written.
    """
    if not local.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(local))
    locked: list[tarfile.TarInfo] = []
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for path in _walk(local):
            _pack_entry(tar, path, name=str(path.relative_to(local)), locked=locked)
        for entry in reversed(locked):  # a folder after those in it
            tar.addfile(entry)
    return {entry.name: entry.mode for entry in reversed(locked)}


def _walk(folder: Path) -> Iterator[Path]:
    """What is below a folder, each folder before its content, links not followed."""
    pending = _sorted_entries(folder)
    while pending:
        entry = pending.pop()
        yield Path(entry)
        if entry.is_dir(follow_symlinks=False):
            pending += _sorted_entries(Path(entry))


def _sorted_entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name, reverse=True)


def _pack_entry(tar: tarfile.TarFile, path: Path, *, name: str, locked: list[tarfile.TarInfo]) -> None:
    status = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode) & 0o777, int(status.st_mtime)
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(entry)
    elif stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        if entry.mode & 0o700 != 0o700:
            again = tarfile.TarInfo(name)
            again.type, again.mode, again.mtime = tarfile.DIRTYPE, entry.mode, entry.mtime
            locked.append(again)
            entry.mode |= 0o700
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        with path.open("rb") as file:
            entry.size = os.fstat(file.fileno()).st_size
            tar.addfile(entry, file)


# -- unpacking


def max_archive_bytes(*, max_bytes: int, max_files: int) -> int:
    """How long the archive of a folder within these bounds can be: what is longer need not be kept."""
    return max_bytes + max_files * _MAX_ENTRY_OVERHEAD_BYTES + _MAX_RECORD_BYTES


def unpack_archive(archive: Readable, local: Path, *, max_bytes: int, max_files: int) -> None:
    """Writes what a hostile archive holds into the folder `local`, which is made.

    Files of the same name are replaced. Left out are: names that are absolute or hold `..`, symbolic links that are
    absolute, lead out of the folder or go up again after going down (which could lead out by way of another link),
    hard links to anything but a file of this archive, devices, pipes and whatever is not known. No link is followed,
    of the archive or of the folder. Permissions are those of an ordinary file or folder.

    Raises:
        ValueError: it holds more than `max_bytes` of content or `max_files` entries, or folders nested deeper than
            200; part of it may have been written.
        ArchiveError: it is no archive, or ends before its end; likewise.
        OSError: `local` cannot be written.
    """
    local.mkdir(parents=True, exist_ok=True)
    root = os.open(local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    unpacking = _Unpacking(root=root, num_left=max_files)
    num_bytes = 0
    try:
        for num_entries, entry in enumerate(_read_entries(archive)):
            num_bytes += entry.num_bytes
            if num_entries > max_files:  # the folder itself is one
                raise ValueError(f"the folder holds more than {max_files} files")
            if num_bytes > max_bytes:
                raise ValueError(f"the folder holds more than {max_bytes} bytes")
            unpacking.take(entry, archive)
        unpacking.make_links()
    finally:
        os.close(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entry; its content, when it has some, comes next in the archive."""

    kind: bytes
    name: bytes
    link: bytes
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Unpacking:
    """The folder that is written, by its descriptor: its name may come to mean something else."""

    root: int
    num_left: int
    """How many folders may still be made: one name can ask for thousands."""
    written: set[tuple[bytes, ...]] = field(default_factory=set)
    links: dict[tuple[bytes, ...], bytes] = field(default_factory=dict)

    def take(self, entry: _Entry, archive: Readable) -> None:
        """Writes an entry, or keeps it for later, or leaves it out; reads all its content in any case."""
        steps = _steps(entry.name)
        if steps and len(steps) > _MAX_DEPTH:
            raise ValueError(f"the folder holds folders nested deeper than {_MAX_DEPTH}")
        if steps and entry.kind in _FILE_KINDS and entry.name[-1:] != b"/":
            self._write_file(steps, entry, archive)
            return
        _skip(archive, entry.num_bytes)
        if not steps:
            return
        if entry.kind in (b"5", *_FILE_KINDS):  # old archives: a file that ends in a slash
            with self._folder(steps):
                pass
        elif entry.kind == b"1":
            self._link_file(steps, entry.link)
        elif entry.kind == b"2" and _stays_inside(steps, entry.link):
            self.links[steps] = entry.link  # made last: no entry can be written through them

    def _write_file(self, steps: tuple[bytes, ...], entry: _Entry, archive: Readable) -> None:
        with self._folder(steps[:-1]) as folder:
            _make_way(steps[-1], folder)
            fd = os.open(steps[-1], _OPEN_NEW_FILE, _FILE_MODE, dir_fd=folder)
            with os.fdopen(fd, "wb") as file:
                for data in _content(archive, entry.num_bytes):
                    file.write(data)
        self.written.add(steps)
        self.links.pop(steps, None)

    def _link_file(self, steps: tuple[bytes, ...], link: bytes) -> None:
        source = _steps(link)
        if not source or source not in self.written or source == steps:
            return
        with self._folder(source[:-1]) as source_folder, self._folder(steps[:-1]) as folder:
            _make_way(steps[-1], folder)
            os.link(source[-1], steps[-1], src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)
        self.written.add(steps)
        self.links.pop(steps, None)

    def make_links(self) -> None:
        """Makes the symbolic links; one whose name has become that of a folder is left out."""
        for steps, link in self.links.items():
            with self._folder(steps[:-1]) as folder, contextlib.suppress(IsADirectoryError):
                _make_way(steps[-1], folder)
                os.symlink(link, steps[-1], dir_fd=folder)

    @contextlib.contextmanager
    def _folder(self, steps: tuple[bytes, ...]) -> Iterator[int]:
        """The folder that is so many steps below the root, made where it is not there. Follows no link."""
        fd = os.dup(self.root)
        try:
            for step in steps:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(step, _FOLDER_MODE, dir_fd=fd)
                    self.num_left -= 1
                if self.num_left < 0:
                    raise ValueError("the folder holds more folders than files are allowed")
                below = os.open(step, _OPEN_FOLDER, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _make_way(name: bytes, folder: int) -> None:
    """Removes a file or link of that name. Raises IsADirectoryError for a folder."""
    try:
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        raise IsADirectoryError(21, "Is a directory", os.fsdecode(name))
    os.unlink(name, dir_fd=folder)


def _steps(name: bytes) -> tuple[bytes, ...] | None:
    """The folders on the way and the last name; empty for the folder itself, None for what leads elsewhere."""
    steps = tuple(step for step in name.split(b"/") if step not in (b"", b"."))
    return None if name.startswith(b"/") or b".." in steps or b"\0" in name else steps


def _stays_inside(steps: tuple[bytes, ...], link: bytes) -> bool:
    """True when a link at `steps` leads nowhere outside, whatever the other links are, which all keep this rule."""
    parts = [part for part in link.split(b"/") if part not in (b"", b".")]
    num_up = next((index for index, part in enumerate(parts) if part != b".."), len(parts))
    is_odd = not link or link.startswith(b"/") or b"\0" in link or b".." in parts[num_up:]
    return not is_odd and num_up <= len(steps) - 1


# -- the format


def _read_entries(archive: Readable) -> Iterator[_Entry]:
    """The entries of an archive in the formats ustar, GNU and pax. Raises ArchiveError."""
    extra: dict[bytes, bytes] = {}
    while True:
        block = _read_whole(archive, _BLOCK_BYTES)
        if not any(block):
            return
        kind, size = _check_block(block), _number(block[124:136])
        if kind in (b"L", b"K", b"x", b"g"):
            content = _read_header(archive, size)
            if kind in (b"L", b"K"):
                extra[b"path" if kind == b"L" else b"linkpath"] = content.rstrip(b"\0")
            elif kind == b"x":
                extra.update(_pax_records(content))
            continue
        if kind == b"S" or _SPARSE in extra:
            raise ArchiveError("sparse files are not known here")
        yield _entry(block, kind, size, extra)
        extra = {}


def _entry(block: bytes, kind: bytes, size: int, extra: dict[bytes, bytes]) -> _Entry:
    name, link, prefix = (_text(block[start:end]) for start, end in ((0, 100), (157, 257), (345, 500)))
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    if b"size" in extra:
        size = _decimal(extra[b"size"])
    return _Entry(
        kind=kind,
        name=extra.get(b"path", name),
        link=extra.get(b"linkpath", link),
        num_bytes=0 if kind in (b"1", b"2", b"3", b"4", b"5", b"6") else size,
    )


def _check_block(block: bytes) -> bytes:
    """The kind of entry that a header is for. Raises ArchiveError when it is no header."""
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if _number(block[148:156]) != total:
        raise ArchiveError("what the box sent is no archive")
    return block[156:157]


def _number(text: bytes) -> int:
    """A number in octal digits, or in binary where its first byte says so. Raises ArchiveError."""
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    digits = text.strip(b" \0")
    if digits.strip(b"01234567"):
        raise ArchiveError("a header of the archive is damaged")
    return int(digits or b"0", 8)


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise ArchiveError("a header of the archive is damaged")
    return int(text)


def _text(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    """Those records `LENGTH KEY=VALUE` and a line end of an extended header that are known here; the others could be
    of any number. Raises ArchiveError."""
    records: dict[bytes, bytes] = {}
    content = content.rstrip(b"\0")
    start = 0
    while start < len(content):
        length, _, _ = content[start : start + 24].partition(b" ")
        end = start + _decimal(length)
        key, equals, value = content[start + len(length) + 1 : end - 1].partition(b"=")
        if not equals or end > len(content) or content[end - 1 : end] != b"\n":
            raise ArchiveError("a header of the archive is damaged")
        if key in _KNOWN_RECORDS:
            records[key] = value
        elif key.startswith(_SPARSE):
            records[_SPARSE] = b""
        start = end
    return records


def _read_header(archive: Readable, size: int) -> bytes:
    if size > _MAX_HEADER_BYTES:
        raise ArchiveError(f"a header of {size} bytes in the archive")
    return b"".join(_content(archive, size))


def _content(archive: Readable, size: int) -> Iterator[bytes]:
    """The content of an entry, piece by piece, and past the padding behind it."""
    left = size
    while left:
        data = _read_whole(archive, min(left, _COPY_BYTES))
        left -= len(data)
        yield data
    _read_whole(archive, -size % _BLOCK_BYTES)


def _skip(archive: Readable, size: int) -> None:
    for _ in _content(archive, size):
        pass


def _read_whole(archive: Readable, num_bytes: int) -> bytes:
    data = archive.read(num_bytes) if num_bytes else b""
    if len(data) != num_bytes:
        raise ArchiveError("the archive ends before its end")
    return data
