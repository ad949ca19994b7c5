"""Publications: complete or not there, and only the newest are kept."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driftgym.trainer.weights import publish_weights


def _publish(root, version, *, incarnation=1, tensors=None, tokenizer_folder=None):
    return publish_weights(
        tensors or [("a", torch.full((2,), float(version))), ("b", torch.ones(3, 2).T)],
        root=root,
        policy_version=version,
        incarnation=incarnation,
        config={"model_type": "qwen3"},
        tokenizer_folder=tokenizer_folder or root / "none",
    )


def test_the_update_names_the_folder_and_the_checksum_of_its_weights(tmp_path, tiny_model_folder):
    update = _publish(tmp_path, 8, tokenizer_folder=tiny_model_folder)
    folder = Path(update.location)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    data = (folder / "model.safetensors").read_bytes()
    assert update.checksum == "sha256:" + hashlib.sha256(data).hexdigest()
    assert (update.policy_version, update.incarnation, update.kind, update.transport) == (8, 1, "full", "disk")
    assert load_file(folder / "model.safetensors")["a"].tolist() == [8.0, 8.0]


def test_the_two_newest_are_kept(tmp_path):
    for version in (0, 8, 9, 10):
        _publish(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10", "1-9"]
    _publish(tmp_path, 3, incarnation=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10", "2-3"]


def test_a_version_published_again_replaces_the_earlier_one(tmp_path):
    _publish(tmp_path, 0)
    update = _publish(tmp_path, 0, tensors=[("a", torch.full((1,), 5.0))])
    assert load_file(f"{update.location}/model.safetensors")["a"].tolist() == [5.0]
    assert [path.name for path in tmp_path.iterdir()] == ["1-0"]


def test_folders_of_others_are_left_alone(tmp_path):
    for name in ("notes", "x-1", "1-2-3"):
        (tmp_path / name).mkdir()
    for version in range(4):
        _publish(tmp_path, version)
    assert {"notes", "x-1", "1-2-3"} <= {path.name for path in tmp_path.iterdir()}


def test_an_error_midway_leaves_the_old_one(tmp_path):
    def failing():
        yield "a", torch.zeros(1)
        raise RuntimeError("gone")

    old = _publish(tmp_path, 1)
    with pytest.raises(RuntimeError, match="gone"):
        _publish(tmp_path, 2, tensors=failing())
    assert load_file(f"{old.location}/model.safetensors")["a"].tolist() == [1.0, 1.0]
    assert not (tmp_path / "1-2").exists()


_STUCK_WRITER = """
import sys, time, torch
from pathlib import Path
from driftgym.trainer.weights import publish_weights

def stuck():
    yield "a", torch.zeros(1)
    print("midway", flush=True)
    time.sleep(60)

root = Path(sys.argv[1])
publish_weights(stuck(), root=root, policy_version=2, incarnation=1, config={}, tokenizer_folder=root)
"""


def test_a_writer_killed_midway_leaves_the_old_one(tmp_path):
    old = _publish(tmp_path, 1)
    writer = subprocess.Popen([sys.executable, "-c", _STUCK_WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "midway\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    assert load_file(f"{old.location}/model.safetensors")["a"].tolist() == [1.0, 1.0]
    assert not (tmp_path / "1-2").exists()
    _publish(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1", "1-2"]
