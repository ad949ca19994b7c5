"""Build contexts: what of a folder counts, its hash, the images that a Dockerfile names; and the lock of a build."""

import asyncio
import io
import os
import socket
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from driftgym.errors import ConfigError, SandboxError
from driftgym.sandboxes.build_context import named_images, read_context
from driftgym.sandboxes.build_lock import only_one

FROM = "FROM driftgym/base:debian\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a Dockerfile, a file, and a file below."""
    root = tmp_path / "box"
    (root / "below").mkdir(parents=True)
    (root / "Dockerfile").write_text(FROM + "COPY . /box\n")
    (root / "a.txt").write_text("one")
    (root / "below" / "b.txt").write_text("two")
    return root


def digest(folder: Path) -> str:
    return read_context(folder).digest()


def packed(folder: Path) -> dict[str, tarfile.TarInfo]:
    """The members of the archive that the engine gets."""
    buffer = io.BytesIO()
    read_context(folder).pack(buffer)
    buffer.seek(0)
    return {member.name: member for member in tarfile.open(fileobj=buffer).getmembers()}


def nothing(text: str) -> None:
    """Says nothing."""


def test_the_digest_depends_on_content_alone(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    os.utime(folder / "a.txt", (1, 1))
    assert digest(folder) == before
    folder.rename(tmp_path / "elsewhere")
    assert digest(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a.txt").write_text("One"),
        lambda root: (root / "a.txt").chmod(0o755),
        lambda root: (root / "a.txt").rename(root / "c.txt"),
        lambda root: (root / "below" / "b.txt").unlink(),
        lambda root: (root / "empty").mkdir(),
        lambda root: (root / "link").symlink_to("a.txt"),
        lambda root: (root / "Dockerfile").write_text(FROM),
        lambda root: (root / "a.txt").rename(root / "below" / "a.txt"),
    ],
    ids=["content", "mode", "name", "removed", "folder", "link", "dockerfile", "place"],
)
def test_every_change_is_another_digest(folder: Path, change) -> None:
    before = digest(folder)
    change(folder)
    assert digest(folder) != before


def test_the_target_of_a_link_counts_and_not_what_it_holds(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "outside")
    before = digest(folder)
    (tmp_path / "outside").write_text("changed")
    assert digest(folder) == before
    (folder / "link").unlink()
    (folder / "link").symlink_to("a.txt")
    assert digest(folder) != before


def test_what_is_ignored_does_not_count(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# rules\n*.log\nbelow\n!below/b.txt\n\n")
    (folder / "below" / "c.txt").write_text("x")
    before = digest(folder)
    (folder / "run.log").write_text("x")
    (folder / "below" / "d.txt").write_text("x")
    assert digest(folder) == before
    assert set(packed(folder)) == {".dockerignore", "Dockerfile", "a.txt", "below/b.txt"}
    (folder / "below" / "b.txt").write_text("changed")
    assert digest(folder) != before


def test_an_ignored_dockerfile_is_built_from_all_the_same(folder: Path) -> None:
    (folder / ".dockerignore").write_text("*\n")
    assert "Dockerfile" in packed(folder)


def test_the_archive_holds_files_folders_and_links_alone(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "up").symlink_to("..")
    os.link(folder / "a.txt", folder / "hard")
    (folder / "a.txt").chmod(0o640)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        members = packed(folder)
    assert set(members) == {"Dockerfile", "a.txt", "hard", "below", "below/b.txt", "loop", "up"}
    assert members["hard"].isreg()
    assert members["loop"].issym()
    assert members["up"].linkname == ".."
    assert members["a.txt"].mode == 0o640
    assert {member.uid for member in members.values()} == {0}


def test_odd_names_and_large_files_are_packed(folder: Path) -> None:
    (folder / "große Datei 🎈").write_bytes(b"x" * 3_000_000)
    os.close(os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    (folder / ("n" * 200)).write_text("")
    members = packed(folder)
    assert members["große Datei 🎈"].size == 3_000_000
    assert {"n" * 200, os.fsdecode(b"\xff")} <= set(members)


def test_the_digest_is_that_of_what_is_packed(folder: Path) -> None:
    context = read_context(folder)
    assert context.pack(io.BytesIO()) == context.digest()


def test_a_file_that_goes_meanwhile_is_a_clear_error(folder: Path) -> None:
    context = read_context(folder)
    (folder / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"box: cannot be read, or changed meanwhile.*a\.txt"):
        context.digest()


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no folder"):
        read_context(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop: no folder"):
        read_context(tmp_path / "loop")


def test_a_file_in_place_of_the_folder_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give the one that holds the Dockerfile"):
        read_context(folder / "Dockerfile")


@pytest.mark.parametrize("content", ["", "# FROM here\n", "RUN true\n", "ARG A=1\n"])
def test_a_dockerfile_without_from_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "Dockerfile").write_text(content)
    with pytest.raises(ConfigError, match="Dockerfile: has no FROM"):
        read_context(folder)


def test_a_dockerfile_that_is_not_there_is_a_clear_error(folder: Path, tmp_path: Path) -> None:
    path = folder / "Dockerfile"
    path.unlink()
    with pytest.raises(ConfigError, match="Dockerfile: is missing"):
        read_context(folder)
    path.symlink_to("Dockerfile")
    with pytest.raises(ConfigError, match="Dockerfile: cannot be read"):
        read_context(folder)
    path.unlink()
    (tmp_path / "outside").write_text(FROM)
    path.symlink_to("../outside")
    with pytest.raises(ConfigError, match="Dockerfile: leads out of the folder"):
        read_context(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="Dockerfile: cannot be read"):
        read_context(folder)
    path.rmdir()
    path.write_bytes(b"FROM \xff\n")
    with pytest.raises(ConfigError, match="Dockerfile: cannot be read"):
        read_context(folder)


@pytest.mark.parametrize(
    ("dockerfile", "images"),
    [
        ("FROM a", ("a",)),
        ("from a:1 as x\nFROM --platform=linux/amd64 b@sha256:12 AS y\nFROM X\n", ("a:1", "b@sha256:12")),
        ("ARG V=12\nFROM node:${V}-slim", ("node:12-slim",)),
        ("ARG V=12\nARG T=${V}-slim\nFROM node:$T", ("node:12-slim",)),
        ('ARG V="3" W\nFROM p:${V:-4}${W:-x}${V:+y}', ("p:3xy",)),
        ("# FROM z\n  # FROM y\nFROM \\\n# between\n\n  a \\\n AS b\nFROM b", ("a",)),
        ("# escape=`\nFROM `\n a", ("a",)),
        ("FROM scratch\nCOPY --from=tools:2 --chown=1:1 /x /x", ("tools:2",)),
        ("FROM a AS one\nFROM b\nCOPY --from=ONE /x /x\nCOPY --from=0 /y /y", ("a", "b")),
        ("FROM a\nRUN echo FROM c\nFROM a", ("a",)),
        ("FROM a\nARG V=1\nFROM ${V}b", ("a", "b")),
        ("RUN true", None),
    ],
)
def test_the_images_that_a_dockerfile_names(dockerfile: str, images: tuple[str, ...] | None) -> None:
    assert named_images(dockerfile) == images


def test_a_full_disk_is_told_as_such(folder: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as disk, pytest.raises(SandboxError, match=r"no room.*No space left"):
        read_context(folder).pack(disk)


def names_of_locks(folder: Path) -> list[Path]:
    return list(folder.glob("*/*.lock"))


async def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with only_one("test/odd", timeout_s=5, say=nothing):
        (lock,) = names_of_locks(tmp_path)
    lock.mkdir()
    with pytest.raises(SandboxError, match="no build can be locked"):
        async with only_one("test/odd", timeout_s=5, say=nothing):
            pass


async def test_one_build_at_a_time() -> None:
    inside = 0
    most = 0

    async def build() -> None:
        nonlocal inside, most
        async with only_one("test/one", timeout_s=20, say=nothing):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.02)
            inside -= 1

    await asyncio.gather(*(build() for _ in range(4)))
    assert most == 1


async def test_who_waits_is_told_and_not_forever(tmp_path: Path) -> None:
    said: list[str] = []
    async with only_one("test/held", timeout_s=5, say=nothing), only_one("test/other", timeout_s=5, say=nothing):
        with pytest.raises(SandboxError, match="test/held is being built elsewhere"):
            async with only_one("test/held", timeout_s=0.1, say=said.append):
                pass
    assert said == ["test/held is being built elsewhere: waiting"]
    async with only_one("test/held", timeout_s=0.1, say=nothing):
        pass


HOLDER = """
import asyncio
from driftgym.sandboxes.build_lock import only_one
async def main():
    async with only_one("test/killed", timeout_s=5, say=print):
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_lock_of_a_process_that_is_killed_is_free() -> None:
    argv = (sys.executable, "-P", "-c", HOLDER)
    holder = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"held\n"
        with pytest.raises(SandboxError, match="built elsewhere"):
            async with only_one("test/killed", timeout_s=0.1, say=nothing):
                pass
    finally:
        holder.kill()
        await holder.communicate()
    async with only_one("test/killed", timeout_s=5, say=nothing):
        pass
