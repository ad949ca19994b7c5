"""Folders into boxes and out of them, and what else of the contract is about bytes: over every implementation."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import MIB, Sandbox, SandboxProvider, SandboxSpec

ODD_NAMES = ("ünï cödé", "-rf", "*", "a b\tc", "quo'te\"s", "new\nline", "back\\slash", ".hidden", "x" * 200)


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """The content of every file below a folder, None for a folder."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


async def test_folders_go_in_and_come_out(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "empty").mkdir()
    (source / "a" / "b" / "data").write_bytes(bytes(range(256)) * 2000)
    (source / "none").write_bytes(b"")
    for name in ODD_NAMES:
        (source / name).write_bytes(name.encode())
    await box.upload(source, "/work/here/it is")
    assert await box.read_file("here/it is/a/b/data") == bytes(range(256)) * 2000
    await box.download("here/it is", tmp_path / "back")
    assert tree_of(tmp_path / "back") == tree_of(source)


async def test_upload_replaces_files_and_leaves_others(box: Sandbox, tmp_path: Path) -> None:
    await box.write_file("here/same", b"older and longer")
    await box.write_file("here/other", b"other")
    (tmp_path / "same").write_bytes(b"new")
    await box.upload(tmp_path, "here")
    assert await box.read_file("here/same") == b"new"
    assert await box.read_file("here/other") == b"other"
    (tmp_path / "same").unlink()
    await box.upload(tmp_path, "")
    await box.upload(tmp_path, "made")
    await box.download("made", tmp_path / "back")
    assert tree_of(tmp_path / "back") == {}


async def test_download_adds_to_a_folder(box: Sandbox, tmp_path: Path) -> None:
    await box.write_file("here/same", b"new")
    (tmp_path / "same").write_bytes(b"older and longer")
    (tmp_path / "other").write_bytes(b"other")
    await box.download("/work/here", tmp_path)
    assert tree_of(tmp_path) == {"same": b"new", "other": b"other"}


async def test_transfer_errors_have_their_types(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for local in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(NotADirectoryError):
            await box.upload(local, "here")
    with pytest.raises(OSError, match="driftgym"):
        await box.upload(tmp_path, "/sys/driftgym")
    await box.write_file("file", b"x")
    for path in ("missing", "file", "missing/below"):
        with pytest.raises(FileNotFoundError):
            await box.download(path, tmp_path / "back")
    with pytest.raises(OSError, match="file"):
        await box.download("", tmp_path / "file")
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_download_is_bounded(box: Sandbox, tmp_path: Path) -> None:
    for index in range(3):
        await box.write_file(f"here/{index}", b"x" * 1000)
    await box.download("here", tmp_path / "fits", max_bytes=3000, max_files=3)
    with pytest.raises(ValueError, match="more"):
        await box.download("here", tmp_path / "bytes", max_bytes=2999)
    with pytest.raises(ValueError, match="more"):
        await box.download("here", tmp_path / "files", max_files=2)
    assert (await box.exec(["echo", "on"])).stdout == "on\n"


async def test_ping_answers_until_the_box_is_closed(box: Sandbox) -> None:
    await box.ping(timeout_s=30)
    await asyncio.gather(*(box.ping(timeout_s=30) for _ in range(8)))
    await box.close()
    with pytest.raises(SandboxError):
        await box.ping(timeout_s=30)


async def test_closed_box_copies_nothing(box: Sandbox, tmp_path: Path) -> None:
    await box.close()
    with pytest.raises(SandboxError):
        await box.upload(tmp_path, "here")
    with pytest.raises(SandboxError):
        await box.download("/work", tmp_path / "back")


async def test_reset_may_keep_files(box: Sandbox) -> None:
    process = await box.spawn(["cat"])
    await box.write_file("kept", b"x")
    await box.reset(keep_files=True)
    assert not process.is_alive
    assert await box.read_file("kept") == b"x"
    await box.reset()
    with pytest.raises(FileNotFoundError):
        await box.read_file("kept")


async def test_output_is_cut_at_the_limit_of_the_spec(provider: SandboxProvider, spec: SandboxSpec) -> None:
    box = await provider.start(spec.model_copy(update={"max_output_bytes": 10}), timeout_s=60)
    for size in (10, 11):
        result = await box.exec(["cat"], stdin=b"x" * size)
        assert (result.stdout, result.output_truncated) == ("x" * 10, size > 10)
    assert (await box.exec(["cat"], stdin=b"x" * 11, max_output_bytes=11)).stdout == "x" * 11


async def test_large_input_and_output_are_whole(real_box: Sandbox) -> None:
    data = os.urandom(1024) * 8 * 1024
    line = "tee copy | wc -c; cat copy >&2"
    result = await real_box.exec(line, stdin=b"%d" % 7 * 8 * MIB, timeout_s=60, max_output_bytes=16 * MIB)
    assert (result.exit_code, len(result.stderr), result.output_truncated) == (0, 8 * MIB, False)
    await real_box.write_file("data", data)
    assert await real_box.read_file("data", max_bytes=8 * MIB) == data
    assert int((await real_box.exec("cat data | wc -c", stdin=data)).stdout) == len(data)


STAT = "stat -c '%A %n' * locked/*"
# gVisor's kernel refuses what `stat` and `ls -l` ask it for.
GVISOR_STAT = """python3 -c "
import glob, os, stat
for name in glob.glob('*') + glob.glob('locked/*'): print(stat.filemode(os.lstat(name).st_mode), name)"
"""


async def test_permissions_and_links_go_in(real_box: Sandbox, real_kind: str, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "script").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "locked" / "script").chmod(0o750)
    (tmp_path / "locked").chmod(0o555)
    (tmp_path / "inside").symlink_to("locked/script")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    await real_box.upload(tmp_path, "here")
    assert (await real_box.exec("./inside", cwd="/work/here")).stdout == "ran\n"
    show = GVISOR_STAT if real_kind == "gvisor" else STAT
    listed = await real_box.exec(f"{show}\nfor n in inside outside loop; do readlink $n; done", cwd="/work/here")
    modes = {line.split()[1]: line.split()[0] for line in listed.stdout.splitlines() if " " in line}
    assert set(modes) == {"locked", "locked/script", "inside", "outside", "loop"}
    assert modes["locked"] == "dr-xr-xr-x"
    assert modes["locked/script"] == "-rwxr-x---"
    assert listed.stdout.splitlines()[-3:] == ["locked/script", "/etc/passwd", "loop"]
    (tmp_path / "locked").chmod(0o755)


HOSTILE = """
mkdir -p here/sub; cd here
echo in >file; chmod 4777 file; ln file hard; ln -s file link; ln -s ../file sub/up; ln -s sub folder
ln -s /etc/passwd absolute; ln -s ../../../../etc/passwd relative; ln -s .. parent; ln -s sub/up/../.. crooked
ln -s sub/.. round; ln -s missing dangling; mkfifo fifo; echo no >unreadable; chmod 0 unreadable
chmod 0777 sub; mkdir empty
"""


async def test_what_comes_out_is_harmless(real_box: Sandbox, tmp_path: Path) -> None:
    assert (await real_box.exec(HOSTILE)).exit_code == 0
    old = tmp_path / "old"
    old.write_bytes(b"untouched")
    back = tmp_path / "back"
    back.mkdir()
    (back / "file").symlink_to(old)
    await real_box.download("here", back)
    assert old.read_bytes() == b"untouched"
    names = {str(path.relative_to(back)) for path in back.rglob("*")}
    wanted = {"file", "hard", "link", "sub", "sub/up", "folder", "dangling", "empty"}
    assert names - {"unreadable", "folder/up"} == wanted  # this machine's root can read all of a process box
    assert (back / "hard").read_text() == (back / "link").read_text() == (back / "sub/up").read_text() == "in\n"
    assert stat.S_IMODE((back / "file").stat().st_mode) & 0o7111 == 0
    assert stat.S_IMODE((back / "sub").stat().st_mode) & 0o7022 == 0
    for path in back.rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir()
        assert path.resolve().is_relative_to(back.resolve())


async def test_download_follows_no_link_of_its_target(real_box: Sandbox, tmp_path: Path) -> None:
    await real_box.write_file("here/sub/file", b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="sub"):
        await real_box.download("here", tmp_path / "back")
    assert tree_of(tmp_path / "elsewhere") == {}


async def test_file_that_is_too_large_is_not_waited_for(real_box: Sandbox, tmp_path: Path) -> None:
    await real_box.exec("mkdir here; head -c 30000000 /dev/zero >here/big")
    with pytest.raises(ValueError, match="more"):
        await real_box.download("here", tmp_path / "back", max_bytes=1000, max_files=10)
    assert (await real_box.exec("echo on")).stdout == "on\n"


async def test_upload_ends_by_its_deadline_also_while_it_reads(real_box: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(100 * MIB)
    with pytest.raises(SandboxError, match=r"did not end within 0\.01 s"):
        await real_box.upload(tmp_path, "here", timeout_s=0.01)
    assert (await real_box.exec("echo on")).stdout == "on\n"


async def test_folders_that_are_nested_too_deep_do_not_come_out(real_box: Sandbox, tmp_path: Path) -> None:
    await real_box.exec("mkdir here; cd here; for i in $(seq 300); do mkdir d; cd d; done")
    with pytest.raises(ValueError, match="deeper than 200"):
        await real_box.download("here", tmp_path / "back")


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000], ids=["null", "surrogate", "long"])
async def test_path_of_a_transfer_that_cannot_be(real_box: Sandbox, tmp_path: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        await real_box.download(path, tmp_path / "back")
    with pytest.raises(OSError, match=r"Errno"):
        await real_box.upload(tmp_path, path)
    assert (await real_box.exec("echo on")).stdout == "on\n"


async def test_full_folder_is_an_error_of_the_upload(
    real_provider: SandboxProvider, real_spec: SandboxSpec, tmp_path: Path
) -> None:
    box = await real_provider.start(real_spec.model_copy(update={"work_dir_bytes": 4 * MIB}), timeout_s=60)
    (tmp_path / "big").write_bytes(b"x" * 6 * MIB)
    with pytest.raises(OSError, match=r"Errno") as caught:
        await box.upload(tmp_path, "here")
    assert not isinstance(caught.value, FileNotFoundError)
    with pytest.raises(OSError, match=r"Errno"):
        await box.write_file("big", b"x" * 6 * MIB)
    assert (await box.exec("echo on")).stdout == "on\n"


async def test_reset_during_a_storm_of_processes_comes_back_clean(real_box: Sandbox, real_kind: str) -> None:
    # gVisor's kernel needs processes of the box's limit for each that it runs, and ends where it gets none.
    num_loops = 3 if real_kind == "gvisor" else 20
    storm = f"n=0; while [ $n -lt {num_loops} ]; do (while :; do sleep 0.01; : >$TMPDIR/x$$; done) & n=$((n+1)); done"
    assert (await real_box.exec(storm, timeout_s=60)).exit_code == 0
    await real_box.reset()
    assert (await real_box.exec("find . $TMPDIR -mindepth 1")).stdout == ""
