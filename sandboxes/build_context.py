"""What an image is built from: a folder with a Dockerfile, what of it counts, and the hash of that."""

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from docker.utils.build import exclude_paths

from driftgym.errors import ConfigError, SandboxError

DOCKERFILE = "Dockerfile"
_FORM = b"driftgym build 1\n"
"""Goes into every digest: images of folders that are packed in another way get other names."""
_MTIME_S = 1_577_836_800
"""Of every packed file: an image is a function of its folder's content. 2020, since ZIP knows no time before 1980."""
_NO_IMAGE = "scratch"
_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::(?P<sign>[-+])(?P<word>[^}]*))?\}|\$(?P<plain>\w+)")
_OPTION_FROM = "--from="


class Sink(Protocol):
    """Takes the bytes of an archive."""

    def write(self, data: bytes, /) -> object:
        """Takes the next bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """A folder that an image is built from, as it was when it was read.

    >>> BuildContext(folder=Path("box"), paths=("Dockerfile",), named_images=("driftgym/base:debian",)).folder
    PosixPath('box')
    """

    folder: Path
    """Where it is, without links."""
    paths: tuple[str, ...]
    """What counts: files, folders and links, relative to `folder`, without what `.dockerignore` leaves out."""
    named_images: tuple[str, ...]
    """The images that the Dockerfile takes from elsewhere, in FROM and COPY --from."""

    def digest(self) -> str:
        """A hash of paths, permissions, link targets and contents, in hexadecimal. Reads every file, in pieces.

        Raises:
            ConfigError: a file cannot be read, or changed meanwhile.
            SandboxError: `archive` cannot be written.
        """
        return self.pack(None)

    def pack(self, archive: IO[bytes] | None) -> str:
        """Writes the archive that an engine takes; returns the digest of what was written. Raises as `digest` does."""
        sink = _HashingSink(archive)
        try:
            with tarfile.open(mode="w|", fileobj=sink, format=tarfile.GNU_FORMAT) as packed:  # type: ignore[call-overload]
                for path in self.paths:
                    _add(packed, self.folder, path)
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be read, or changed meanwhile: {error}") from None
        return sink.hash.hexdigest()


class _HashingSink:
    """Hashes what is written, and passes it on."""

    def __init__(self, below: IO[bytes] | None) -> None:
        self.hash = hashlib.sha256(_FORM)
        self._below = below

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        try:
            if self._below is not None:
                self._below.write(data)
        except OSError as error:
            raise SandboxError(f"there is no room to pack what is built from ({error}): set TMPDIR") from None
        return len(data)


def _add(packed: tarfile.TarFile, folder: Path, path: str) -> None:
    """Adds a file, folder or link. Owners are root, hard links are files, and devices, pipes and sockets no part."""
    status = (folder / path).lstat()
    info = tarfile.TarInfo(path)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), _MTIME_S
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
        # Not followed, should it be a link by now; nothing is waited for, should it be a pipe.
        with os.fdopen(os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
            packed.addfile(info, content)
        return
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(folder / path)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    else:
        return
    packed.addfile(info)


def read_context(folder: str | Path) -> BuildContext:
    """The build context in `folder`. `.dockerignore` holds; links are kept as links, and not followed.

    Raises:
        ConfigError: there is no such folder, it has no Dockerfile of its own, or that names no image.
    """
    try:
        root = Path(folder).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise ConfigError(f"{folder}: no folder with a Dockerfile: {_reason(error)}") from None
    if not root.is_dir():
        raise ConfigError(f"{folder}: no folder; give the one that holds the {DOCKERFILE}")
    dockerfile = _read_dockerfile(root)
    try:
        paths = exclude_paths(str(root), _ignored(root), dockerfile=DOCKERFILE)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{root}: cannot be read: {_reason(error)}") from None
    named = named_images(dockerfile)
    if named is None:
        raise ConfigError(f"{root / DOCKERFILE}: has no FROM: its first instruction names the image to begin with")
    return BuildContext(folder=root, paths=tuple(sorted(paths, key=os.fsencode)), named_images=named)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _read_dockerfile(root: Path) -> str:
    path = root / DOCKERFILE
    try:
        where = path.resolve(strict=True)
        if not where.is_relative_to(root):
            raise ConfigError(f"{path}: leads out of the folder, to {where}; builds see only what is in it")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; a folder that an image is built from holds one") from None
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None


def _ignored(root: Path) -> list[str]:
    try:
        lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def named_images(dockerfile: str) -> tuple[str, ...] | None:
    """The images that a Dockerfile takes from elsewhere, each once; None when there is no FROM.

    >>> named_images("FROM driftgym/base:debian AS made\\nRUN true\\nFROM scratch\\nCOPY --from=made /bin /bin")
    ('driftgym/base:debian',)
    """
    found: dict[str, None] = {}
    stages: set[str] = set()
    variables: dict[str, str] = {}
    num_stages = 0
    for instruction, words in _instructions(dockerfile):
        if instruction == "ARG" and num_stages == 0:
            _add_defaults(variables, words)
        elif instruction == "FROM":
            plain = [word for word in words if not word.startswith("--")]
            name = _substitute(plain[0], variables) if plain else ""
            if name.lower() not in stages | {_NO_IMAGE, ""}:
                found[name] = None
            if len(plain) == 3:
                stages.add(plain[2].lower())
            num_stages += 1
        elif instruction in ("COPY", "ADD"):
            sources = (word.removeprefix(_OPTION_FROM) for word in words if word.startswith(_OPTION_FROM))
            found |= {name: None for name in sources if not name.isdecimal() and name.lower() not in stages}
    return tuple(found) if num_stages else None


def _instructions(dockerfile: str) -> Iterator[tuple[str, list[str]]]:
    """Each instruction in capitals, with its words; comments are left out and continued lines joined."""
    escape = "`" if re.match(r"#\s*escape\s*=\s*`", dockerfile) else "\\"
    line = ""
    for part in dockerfile.splitlines():
        if part.lstrip().startswith("#") or not part.strip():
            continue
        line += part.strip()
        if line.endswith(escape):
            line = line.removesuffix(escape) + " "
            continue
        words = line.split()
        yield words[0].upper(), words[1:]
        line = ""
    if line.split():
        yield line.split()[0].upper(), line.split()[1:]


def _add_defaults(variables: dict[str, str], words: list[str]) -> None:
    for word in words:
        name, _, value = word.partition("=")
        variables[name] = _substitute(value.strip("\"'"), variables)


def _substitute(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        known = variables.get(match["braced"] or match["plain"], "")
        if match["sign"] == "-":
            return known or match["word"]
        if match["sign"] == "+":
            return match["word"] if known else ""
        return known

    return _VARIABLE.sub(value, text)
