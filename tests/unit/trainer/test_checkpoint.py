"""Sealed folders: whole or not there, and any damage to any file is seen."""

import os
import shutil

import pytest

from driftgym.errors import TrainingError
from driftgym.trainer.checkpoint import check_sealed, damage_of, newest_complete, remove_partial, sealed_folder

_FILES = ["learner/manifest.json", "learner/optimizer.pt", "learner/weights", "manifest.json", "state.json"]


def _write(root, name):
    with sealed_folder(root / name) as partial:
        with sealed_folder(partial / "learner") as inner:
            (inner / "weights").write_bytes(b"weights of " + name.encode())
            (inner / "optimizer.pt").write_bytes(b"optimizer")
        (partial / "state.json").write_text('{"step": 1}')
    return root / name


def test_a_sealed_folder_is_complete(tmp_path):
    folder = _write(tmp_path, "00000001")
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == _FILES
    assert damage_of(folder) is None
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _replace_by_folder(path):
    path.unlink()
    path.mkdir()


def _make_unreadable(path):
    """Reading it gives an I/O error, as on a broken disk, also for root."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def _link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


_DAMAGES = (
    *(_truncate, _flip, lambda path: path.unlink(), lambda path: path.write_bytes(b"")),
    *(_replace_by_folder, _make_unreadable, _link_to_itself),
)


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("name", _FILES)
def test_damage_to_each_file_is_seen_and_the_one_before_is_taken(tmp_path, name, damage):
    older = _write(tmp_path, "00000009")
    newer = _write(tmp_path, "00000010")
    said = []
    assert newest_complete(tmp_path, say=said.append) == newer
    assert said == []
    damage(newer / name)
    assert damage_of(newer) is not None
    assert newest_complete(tmp_path, say=said.append) == older
    assert len(said) == 1
    assert "\n" not in said[0]
    assert str(newer) in said[0]
    with pytest.raises(TrainingError, match="00000010"):
        check_sealed(newer)


@pytest.mark.parametrize("name", ["00000010", "00000010/learner"])
@pytest.mark.parametrize("damage", [shutil.rmtree, lambda path: (shutil.rmtree(path), path.write_bytes(b"x"))])
def test_a_folder_that_is_gone_or_a_file_is_damage(tmp_path, name, damage):
    older, _ = _write(tmp_path, "00000009"), _write(tmp_path, "00000010")
    damage(tmp_path / name)
    said = []
    assert newest_complete(tmp_path, say=said.append) == older
    assert len(said) == (0 if not (tmp_path / "00000010").exists() else 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_damage(tmp_path):
    folder = _write(tmp_path, "1")
    (folder / "state.json").chmod(0)
    assert damage_of(folder) == f"{folder / 'state.json'} cannot be read (Permission denied)"


def test_files_that_are_no_checkpoints_are_not_spoken_of(tmp_path):
    (tmp_path / "notes-2").write_text("mine")
    assert newest_complete(tmp_path, say=pytest.fail) is None


@pytest.mark.parametrize("text", ["[]", "null", '{"files": 3}', "\xff", '{"files": {"weights": null}}'])
def test_a_manifest_of_nonsense_is_damage(tmp_path, text):
    folder = _write(tmp_path, "1")
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    assert damage_of(folder) is not None


def test_without_a_complete_one_there_is_none(tmp_path):
    assert newest_complete(tmp_path / "absent") is None
    assert newest_complete(tmp_path) is None
    (tmp_path / "00000003").mkdir()
    (tmp_path / "notes").mkdir()
    said = []
    assert newest_complete(tmp_path, say=said.append) is None
    assert len(said) == 1


def test_numbers_are_compared_as_numbers(tmp_path):
    _write(tmp_path, "9")
    assert newest_complete(tmp_path) == tmp_path / "9"
    _write(tmp_path, "10")
    assert newest_complete(tmp_path) == tmp_path / "10"


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def write():
        with sealed_folder(tmp_path / "1") as partial:
            (partial / "weights").write_bytes(b"half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_neither_taken_nor_in_the_way(tmp_path):
    older = _write(tmp_path, "1")
    leftover = tmp_path / ".partial-2"
    shutil.copytree(older, leftover)
    assert newest_complete(tmp_path) == older
    assert newest_complete(tmp_path) != leftover
    assert _write(tmp_path, "2") == newest_complete(tmp_path)
    assert not leftover.exists()


def test_what_killed_writers_left_is_removed(tmp_path):
    folder = _write(tmp_path, "1")
    shutil.copytree(folder, tmp_path / ".partial-7")
    remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    remove_partial(tmp_path / "absent")


def test_a_folder_that_holds_something_is_not_replaced(tmp_path):
    folder = _write(tmp_path, "1")
    with pytest.raises(OSError, match="not empty"):
        _write(tmp_path, "1")
    assert damage_of(folder) is None


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "1").mkdir()
    assert damage_of(_write(tmp_path, "1")) is None
