"""Archives on the owner's side: what is packed, and what a hostile one cannot do."""

import contextlib
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgym.errors import SandboxError
from driftgym.sandboxes.archive import max_archive_bytes, pack_folder, unpack_archive

BOUNDS = {"max_bytes": 1_000_000, "max_files": 1000}


def entry(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def archive_of(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / ("deep" * 40) / ("er" * 60)).mkdir(parents=True)
    (source / ("deep" * 40) / ("er" * 60) / "file").write_bytes(b"x" * 100_000)
    (source / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    (source / "link").symlink_to("deep" * 40)
    (source / "long").symlink_to("y" * 300)
    os.mkfifo(source / "fifo")
    with io.BytesIO() as buffer:
        assert pack_folder(source, buffer) == {}
        assert len(buffer.getvalue()) <= max_archive_bytes(max_bytes=100_000, max_files=6)
        buffer.seek(0)
        unpack_archive(buffer, tmp_path / "back", max_bytes=100_000, max_files=6)
    assert names_below(tmp_path / "back") == names_below(source) - {"fifo"}
    assert (tmp_path / "back" / "link" / ("er" * 60) / "file").read_bytes() == b"x" * 100_000
    assert os.readlink(tmp_path / "back" / "long") == "y" * 300


def test_locked_folders_are_told_and_come_twice(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    for name in ("a/b", "a"):
        (tmp_path / name).chmod(0o555)
    buffer = io.BytesIO()
    assert list(pack_folder(tmp_path, buffer).items()) == [("a/b", 0o555), ("a", 0o555)]
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        found = [(info.name, info.mode) for info in tar if info.isdir()]
    assert found == [("a", 0o755), ("a/b", 0o755), ("a/b", 0o555), ("a", 0o555)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_usual_formats_are_read(tmp_path: Path, form: int) -> None:
    long = "/".join(["f" * 50] * 4)
    entries = [entry("./", type=tarfile.DIRTYPE), entry("./" + long, b"long"), entry("plain", b"x" * 513)]
    if form != tarfile.USTAR_FORMAT:
        entries += [entry("ü" * 120, b"u"), link("link", "ü" * 120)]
    unpack_archive(archive_of(*entries, form=form), tmp_path / "new" / "er", **BOUNDS)
    root = tmp_path / "new" / "er"
    assert (root / long).read_bytes() == b"long"
    assert (root / "plain").read_bytes() == b"x" * 513
    if form != tarfile.USTAR_FORMAT:
        assert (root / "link").read_bytes() == b"u"


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack_archive(
        archive_of(
            entry("../up", b"x"),
            entry("a/../../up", b"x"),
            entry(str(tmp_path / "absolute"), b"x"),
            entry("..", type=tarfile.DIRTYPE),
            link("out", ".."),
            entry("out/through", b"x"),
            link("hard", "/etc/passwd", tarfile.LNKTYPE),
            link("hard2", "../secret", tarfile.LNKTYPE),
            entry("device", type=tarfile.CHRTYPE),
            entry("pipe", type=tarfile.FIFOTYPE),
            entry("odd", b"skipped", type=b"V"),
            entry("kept", b"x"),
        ),
        root,
        **BOUNDS,
    )
    assert names_below(tmp_path) == {"root", "root/out", "root/out/through", "root/kept"}
    assert not (root / "out").is_symlink()


def test_links_cannot_lead_out_together(tmp_path: Path) -> None:
    root = tmp_path / "root"
    links = {
        "a/b/c/up": "../../..",
        "out": "a/b/c/up/../x",
        "over": "a/b/c/up/a/../../..",
        "absolute": "/",
        "far": "../root/a",
        "empty": "",
        "fine": "a/b/c/up/a",
        "itself": "itself",
    }
    unpack_archive(archive_of(*(link(name, target) for name, target in links.items())), root, **BOUNDS)
    assert {name for name in links if (root / name).is_symlink()} == {"a/b/c/up", "fine", "itself"}
    assert (root / "fine").resolve() == root / "a"


def test_hard_links_are_to_files_of_the_archive_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    unpack_archive(
        archive_of(
            entry("a/file", b"x"),
            link("same", "a/file", tarfile.LNKTYPE),
            link("a/file", "a/file", tarfile.LNKTYPE),
            link("stolen", "mine", tarfile.LNKTYPE),
            link("soft", "/etc/passwd"),
            link("hard", "soft", tarfile.LNKTYPE),
        ),
        tmp_path,
        **BOUNDS,
    )
    assert names_below(tmp_path) == {"mine", "a", "a/file", "same"}
    assert (tmp_path / "same").read_bytes() == (tmp_path / "a" / "file").read_bytes() == b"x"


def test_names_that_come_twice(tmp_path: Path) -> None:
    unpack_archive(
        archive_of(
            entry("x", b"first"),
            link("x", "y"),
            entry("x", b"second"),
            link("folder", "x"),
            entry("folder", type=tarfile.DIRTYPE),
            entry("y", b"y"),
            link("y", "x"),
        ),
        tmp_path,
        **BOUNDS,
    )
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").read_bytes() == b"second"
    assert (tmp_path / "folder").is_dir()
    assert not (tmp_path / "folder").is_symlink()
    assert os.readlink(tmp_path / "y") == "x"


def test_permissions_are_ordinary(tmp_path: Path) -> None:
    unpack_archive(
        archive_of(entry("folder", type=tarfile.DIRTYPE, mode=0), entry("folder/file", b"x", mode=0o7777)),
        tmp_path,
        **BOUNDS,
    )
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o7133 == 0
    assert (tmp_path / "folder").stat().st_mode & 0o7700 == 0o700


def test_bounds(tmp_path: Path) -> None:
    fits = [entry("./", type=tarfile.DIRTYPE), entry("a", b"x" * 10), entry("b", type=tarfile.DIRTYPE)]
    unpack_archive(archive_of(*fits), tmp_path, max_bytes=10, max_files=2)
    with pytest.raises(ValueError, match="more than 9 bytes"):
        unpack_archive(archive_of(*fits), tmp_path, max_bytes=9, max_files=2)
    with pytest.raises(ValueError, match="more than 1 files"):
        unpack_archive(archive_of(*fits), tmp_path, max_bytes=10, max_files=1)
    with pytest.raises(ValueError, match="folders"):
        unpack_archive(archive_of(entry("d/" * 100 + "x", b"")), tmp_path, max_bytes=10, max_files=50)
    unpack_archive(archive_of(entry("d/" * 199 + "x", b"")), tmp_path / "deep", max_bytes=10, max_files=500)
    with pytest.raises(ValueError, match="deeper than 200"):
        unpack_archive(archive_of(entry("d/" * 200 + "x", b"")), tmp_path, max_bytes=10, max_files=500)
    huge = bytearray(archive_of(entry("a", b"x")).getvalue())
    huge[124:136] = b"\x80" + (1 << 70).to_bytes(11, "big")
    huge[148:156] = b"%06o\0 " % (sum(huge[:148]) + 8 * 32 + sum(huge[156:512]))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        unpack_archive(io.BytesIO(huge), tmp_path, max_bytes=10, max_files=50)


def test_what_is_no_archive(tmp_path: Path) -> None:
    whole = archive_of(entry("a", b"x" * 2000), entry("n" * 200, b"y")).getvalue()
    end = whole.rstrip(b"\0")
    for data in (b"", b"nonsense" * 100, whole[:600], whole[:100], end[: len(end) - 1], b"\xff" * 512):
        with pytest.raises(SandboxError):
            unpack_archive(io.BytesIO(data), tmp_path / "x", **BOUNDS)
    with pytest.raises(NotADirectoryError):
        pack_folder(tmp_path / "missing", io.BytesIO())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        unpack_archive(io.BytesIO(whole), tmp_path / "file", **BOUNDS)


def test_long_header_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="header of"):
        unpack_archive(archive_of(entry("a" * 100_000, b"")), tmp_path, **BOUNDS)


def test_headers_without_an_entry_fill_no_memory(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    for number in range(20):
        content = b"".join(b"15 %05x%05x=\n" % (number, index) for index in range(4000))
        header = tarfile.TarInfo("header")
        header.type, header.size = tarfile.XHDTYPE, len(content)
        buffer.write(header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512))
    buffer.write(bytes(1024))
    buffer.seek(0)
    tracemalloc.start()
    unpack_archive(buffer, tmp_path, **BOUNDS)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000
    assert names_below(tmp_path) == set()


@given(position=st.integers(0, 3071), value=st.integers(0, 255), cut=st.integers(0, 4096))
def test_damage_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    data = bytearray(
        archive_of(entry("a/b", b"x" * 10, mode=0o600), link("c", "a/b"), form=tarfile.PAX_FORMAT).getvalue()
    )
    data[position] = value
    header = position // 512 * 512
    data[header + 148 : header + 156] = b"%06o\0 " % (
        sum(data[header : header + 512]) - sum(data[header + 148 : header + 156]) + 8 * 32
    )
    folder = tmp_path_factory.mktemp("damage")
    with contextlib.suppress(SandboxError, ValueError, OSError):
        unpack_archive(io.BytesIO(data[: len(data) - cut]), folder / "root", max_bytes=100, max_files=5)
    assert set(os.listdir(folder)) <= {"root"}
