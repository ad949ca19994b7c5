"""Attempts to reach other files through those that the owner reads, writes and copies, or to write where he does."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks import KINDS, attempt_program, small_box

from driftgym.sandboxes.base import MIB, Sandbox

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(kind: str) -> AsyncIterator[Sandbox]:
    async with small_box(kind) as box:
        yield box


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Sandbox) -> Sandbox:
    """The one box of this module, clean."""
    await boxes.reset()
    return boxes


def below(folder: Path) -> list[Path]:
    """Everything in a folder of this machine."""
    return list(folder.rglob("*"))


LINKS = {
    "shadow": "/etc/shadow",
    "other-memory": "/proc/1/mem",
    "own-memory": "/proc/self/mem",
    "own-stream": "/proc/self/fd/0",
    "other-stream": "/proc/1/fd/1",
    "environment-of-the-guard": "/proc/1/environ",
    "loop": "link",
    "endless": "/dev/zero",
    "terminal": "/dev/tty",
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS.keys())
async def test_links_lead_nowhere_that_the_agent_may_not_go(box: Sandbox, kind: str, target: str) -> None:
    """Files are read and written with the agent's own rights. The environment of the first process is readable under
    gVisor, and holds nothing."""
    await box.exec(f"ln -s {target} link")
    if not (kind == "gvisor" and target.endswith("environ")):
        with pytest.raises(FileNotFoundError):
            await box.read_file("link")
    with pytest.raises(OSError, match="link"):
        await box.write_file("link", b"x")
    assert (await box.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize("target", ["/etc", "/root", "/proc/1", "/dev", "/nowhere"])
async def test_folders_are_filled_with_the_agent_s_rights(box: Sandbox, tmp_path: Path, target: str) -> None:
    (tmp_path / "x").write_text("x")
    await box.exec(f"ln -s {target} link")
    with pytest.raises(OSError, match=r"Errno|link"):
        await box.upload(tmp_path, "/work/link")
    assert (await box.exec(f"test -e {target}/x")).exit_code == 1


@pytest.mark.parametrize("target", ["/root", "/proc/1/cwd", "/proc/1/fd", "/nowhere"])
async def test_folders_are_read_with_the_agent_s_rights(box: Sandbox, kind: str, tmp_path: Path, target: str) -> None:
    """What cannot be listed is not there. gVisor lists the streams of the first process, and lets nobody open them."""
    await box.exec(f"ln -s {target} link")
    if kind == "gvisor" and target.endswith("fd"):
        await box.download("/work/link", tmp_path / "got")
        assert not [path for path in (tmp_path / "got").iterdir() if path.is_file()]
        return
    with pytest.raises(FileNotFoundError):
        await box.download("/work/link", tmp_path / "got")


async def test_download_brings_nothing_of_this_machine(box: Sandbox, tmp_path: Path) -> None:
    """Links in the box point into the box, and would point at this machine's files once they are here."""
    script = (
        "os.makedirs('/work/d/in'); os.chdir('/work/d')\n"
        "open('plain', 'w').write('plain'); os.symlink('plain', 'good')\n"
        "os.symlink('/etc/passwd', 'absolute'); os.symlink('../../../../etc/passwd', 'in/relative')\n"
        "os.symlink('/', 'everything'); os.symlink('in', 'folder'); os.mkfifo('pipe')\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('socket'); os.chmod('plain', 0o6777)"
    )
    assert (await box.exec(attempt_program(script))).exit_code == 0
    await box.download("/work/d", tmp_path / "got")
    root = (tmp_path / "got").resolve()
    for path in root.rglob("*"):
        assert path.resolve().is_relative_to(root), path
        assert path.is_file() or path.is_dir(), path
    assert (root / "plain").read_text() == "plain"
    assert (root / "plain").stat().st_mode & 0o7000 == 0
    assert os.listdir(tmp_path) == ["got"]


async def test_download_while_folders_are_swapped_for_links(box: Sandbox, tmp_path: Path) -> None:
    script = (
        "os.makedirs('/work/d/a'); open('/work/d/a/f', 'w').write('mine')\n"
        "os.symlink('/etc', '/work/d/b')\n"
        "if not os.fork():\n"
        "    while True:\n"
        "        for x, y in (('a', 't'), ('b', 'a'), ('t', 'b')): os.rename('/work/d/' + x, '/work/d/' + y)"
    )
    assert (await box.exec(attempt_program(script))).exit_code == 0
    for number in range(5):
        got = tmp_path / str(number)
        await box.download("/work/d", got)
        for path in got.rglob("*"):
            assert path.resolve().is_relative_to(got.resolve()), path
    assert set(os.listdir(tmp_path)) == {str(number) for number in range(5)}
    await box.reset()


async def test_files_that_are_longer_than_any_disk(box: Sandbox, tmp_path: Path) -> None:
    """Sparse ones take no space in the box; here they would."""
    await box.exec("mkdir d; truncate -s 1T d/big 2>/dev/null || truncate -s 1G d/big")
    with pytest.raises(ValueError, match="longer than"):
        await box.read_file("d/big")
    with pytest.raises(ValueError, match=r"more than|longer than|bytes"):
        await box.download("/work/d", tmp_path / "got", max_bytes=MIB)
    assert sum(path.stat().st_size for path in below(tmp_path)) < 4 * MIB
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_more_files_than_asked_for(box: Sandbox, tmp_path: Path) -> None:
    await box.exec(attempt_program("os.mkdir('/work/d')\nfor n in range(500): open(f'/work/d/{n}', 'w')"))
    with pytest.raises(ValueError, match=r"more than|files"):
        await box.download("/work/d", tmp_path / "got", max_files=100)
    assert len(below(tmp_path)) <= 101
