"""Publications: complete or not there, no larger than they need to be, and removed once nothing needs them."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from driftgym.trainer.adapters import Adapter
from driftgym.trainer.publications import RECORD_FILE, is_published, read_publication, remove_unused, write_record
from driftgym.trainer.weights import ADAPTER_FILE, DELTA_FILE, WEIGHTS_FILE, WeightPublisher
from driftgym.types import WeightUpdate

FILES = {"full": WEIGHTS_FILE, "delta": DELTA_FILE, "lora": ADAPTER_FILE}
EIGHT = tuple(f"layer{index}" for index in range(8))


def publisher(root: Path, *, incarnation: int = 1, **options: Any) -> WeightPublisher:
    options = {"config": {"model_type": "qwen3"}, "tokenizer_folder": root / "none", **options}
    return WeightPublisher(root, incarnation=incarnation, **options)


def weights(version: int) -> list[tuple[str, Tensor]]:
    return [("a", torch.full((2,), float(version))), ("b", torch.ones(3, 2).T)]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def file_of(update: WeightUpdate) -> Path:
    return Path(update.location, FILES[update.kind])


def test_the_update_names_the_folder_and_the_checksum_of_its_weights(tmp_path: Path, tiny_model_folder: Path) -> None:
    update = publisher(tmp_path, tokenizer_folder=tiny_model_folder).publish(weights(8), 8)
    folder = Path(update.location)
    expected = ["config.json", "model.safetensors", "publication.json", "tokenizer.json", "tokenizer_config.json"]
    assert names(folder) == expected
    data = (folder / "model.safetensors").read_bytes()
    assert update.checksum == "sha256:" + hashlib.sha256(data).hexdigest()
    assert (update.policy_version, update.incarnation, update.kind, update.transport) == (8, 1, "full", "disk")
    assert load_file(folder / "model.safetensors")["a"].tolist() == [8.0, 8.0]
    assert read_publication(folder) == update


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    first = publisher(tmp_path)
    for version in (0, 8, 9, 10):
        first.publish(weights(version), version)
    assert names(tmp_path) == ["1-10", "1-9"]
    publisher(tmp_path, incarnation=2).publish(weights(3), 3)
    assert names(tmp_path) == ["1-10", "2-3"]


def test_a_version_is_published_once_a_whole_model_of_it_stands_of_whichever_life(tmp_path: Path) -> None:
    def write(name: str, version: int, **fields: Any) -> None:
        (tmp_path / name).mkdir()
        update = WeightUpdate(policy_version=version, incarnation=1, location=name, checksum="sha256:0", **fields)
        write_record(tmp_path / name, update)

    assert not is_published(tmp_path / "absent", policy_version=5)
    write("1-5", 5, kind="delta", base_policy_version=4)
    write(".partial-2-5", 5)
    (tmp_path / "3-5").mkdir()
    assert not is_published(tmp_path, policy_version=5)
    write("2-5", 5)
    assert is_published(tmp_path, policy_version=5)
    assert not is_published(tmp_path, policy_version=15)


def test_a_version_published_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    again = publisher(tmp_path, kinds=("full", "delta"))
    again.publish(weights(0), 0)
    update = again.publish([("a", torch.full((1,), 5.0))], 0)
    assert update.kind == "full"
    assert load_file(file_of(update))["a"].tolist() == [5.0]
    assert names(tmp_path) == ["1-0"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes", "x-1", "1-2-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "1-0").mkdir()  # a publication without a record: it builds on nothing
    one = publisher(tmp_path)
    for version in range(1, 4):
        one.publish(weights(version), version)
    assert names(tmp_path) == ["1-2", "1-2-3", "1-3", "notes", "x-1"]


def test_an_error_midway_leaves_the_old_one_and_the_next_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    def failing() -> Any:
        yield "a", torch.zeros(1)
        raise RuntimeError("gone")

    one = publisher(tmp_path, kinds=("full", "delta"))
    old = one.publish(layers(0), 1)
    with pytest.raises(RuntimeError, match="gone"):
        one.publish(failing(), 2)
    (tmp_path / ".partial-1-3").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        one.publish(layers(0, layer1=2), 3)
    (tmp_path / ".partial-1-3").unlink()
    assert names(tmp_path) == ["1-1"]
    update = one.publish(layers(0, layer1=2), 4)
    assert (update.kind, update.base_policy_version) == ("delta", 1)
    assert set(load_file(file_of(update))) == {"layer1"}
    assert load_file(file_of(old))["layer1"].tolist() == [0.0] * 10


def layers(value: float, **changed: float) -> list[tuple[str, Tensor]]:
    """Eight tensors of `value`, but for those in `changed`."""
    return [(name, torch.full((10,), float(changed.get(name, value)))) for name in EIGHT]


def applied(chain: list[WeightUpdate]) -> Mapping[str, Tensor]:
    """What an engine has that took these one after the other."""
    held: dict[str, Tensor] = {}
    version = -1
    for update in chain:
        assert update.base_policy_version == (None if update.kind == "full" else version)
        held = load_file(file_of(update)) if update.kind == "full" else {**held, **load_file(file_of(update))}
        version = update.policy_version
    return held


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_only_what_changed_is_published_where_that_is_at_most_half(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    chain = [one.publish(layers(0), 0), one.publish(layers(0, layer7=1), 4), one.publish(layers(0, layer7=2), 8)]
    assert [update.kind for update in chain] == ["full", "delta", "delta"]
    assert names(Path(chain[1].location)) == [DELTA_FILE, RECORD_FILE], "nothing that could be taken for a model"
    assert set(load_file(file_of(chain[2]))) == {"layer7"}
    assert same(applied(chain), dict(layers(0, layer7=2)))
    assert one.publish(layers(0, **dict.fromkeys(EIGHT[:5], 3.0)), 12).kind == "full"


def test_a_chain_of_deltas_never_holds_more_than_a_model(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    chain: list[WeightUpdate] = []
    for version in range(30):
        update = one.publish(layers(0, layer0=version, layer1=version, layer2=version), version)
        chain = [update] if update.kind == "full" else [*chain, update]
        assert sum(each.kind == "delta" for each in chain) * 3 <= len(EIGHT)
        assert same(applied(chain), dict(layers(0, layer0=version, layer1=version, layer2=version)))
    assert {update.kind for update in chain} == {"full", "delta"}


def test_weights_that_did_not_change_are_deltas_of_nothing_and_their_chain_ends_too(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    updates = [one.publish(layers(1), version) for version in range(20)]
    assert [update.kind for update in updates] == ["full"] + ["delta"] * 16 + ["full"] + ["delta"] * 2
    assert load_file(file_of(updates[-1])) == {}
    assert same(applied(updates[17:]), dict(layers(1)))


def test_what_newer_publications_build_on_is_kept(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    for version in range(4):
        one.publish(layers(0, layer0=version), version)
    assert names(tmp_path) == ["1-0", "1-1", "1-2", "1-3"]
    one.publish(layers(9), 4)
    assert names(tmp_path) == ["1-0", "1-1", "1-2", "1-3", "1-4"], "a generator may be starting from the one before"
    one.publish(layers(9, layer0=1), 5)
    assert names(tmp_path) == ["1-4", "1-5"]


def test_a_record_that_makes_no_sense_does_not_stop_the_next_publication(tmp_path: Path) -> None:
    one = publisher(tmp_path)
    for version in (1, 2):
        one.publish(weights(version), version)
    for base in (2, 7, "x", None):
        record = {"policy_version": 2, "incarnation": 1, "kind": "delta", "checksum": "", "base_policy_version": base}
        (tmp_path / "1-2" / RECORD_FILE).write_text(json.dumps(record))
        remove_unused(tmp_path)
    (tmp_path / "1-2" / RECORD_FILE).write_text("[")
    one.publish(weights(3), 3)
    assert names(tmp_path) == ["1-2", "1-3"]


def test_other_names_or_shapes_or_a_new_life_are_published_whole(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    one.publish(layers(0), 0)
    assert one.publish([*layers(0), ("more", torch.zeros(1))], 1).kind == "full"
    reshaped = [(name, tensor.reshape(2, 5)) for name, tensor in layers(0)]
    assert one.publish(reshaped, 2).kind == "full"
    assert one.publish(reshaped, 1).kind == "full", "a version before the newest one"
    assert publisher(tmp_path, incarnation=2, kinds=("full", "delta")).publish(reshaped, 5).kind == "full"


def test_the_last_publication_is_whole_and_engines_that_take_whole_ones_alone_get_those(tmp_path: Path) -> None:
    one = publisher(tmp_path / "a", kinds=("full", "delta"))
    one.publish(layers(0), 0)
    last = one.publish(layers(0), 1, is_last=True)
    assert last.kind == "full"
    assert same(load_file(file_of(last)), dict(layers(0)))
    plain = publisher(tmp_path / "b")
    assert {plain.publish(layers(0), version).kind for version in range(3)} == {"full"}


def test_types_are_told_apart_and_any_type_is_published(tmp_path: Path) -> None:
    one = publisher(tmp_path, kinds=("full", "delta"))
    tensors = [("half", torch.zeros(8, dtype=torch.bfloat16)), ("scalar", torch.tensor(1.0)), ("ints", torch.arange(9))]
    one.publish(tensors, 0)
    tensors[0] = ("half", torch.zeros(8, dtype=torch.float16))
    assert set(load_file(file_of(one.publish(tensors, 1)))) == {"half"}


def adapters(value: float, *, rank: int = 2, scaling: float = 2.0) -> dict[str, Adapter]:
    generator = torch.Generator().manual_seed(int(value * 10) + 1)
    down = torch.randn(rank, 10, generator=generator)
    up = torch.randn(6, rank, generator=generator) * value
    return {"model.q_proj": Adapter(down=down, up=up, scaling=scaling)}


def merged(base: Tensor, put_on: Mapping[str, Adapter]) -> list[tuple[str, Tensor]]:
    one = put_on["model.q_proj"]
    return [("model.q_proj.weight", base + (one.up @ one.down) * one.scaling)]


def loaded(update: WeightUpdate, base: Tensor) -> Tensor:
    """The weight that an engine has which merges the published adapter into `base`."""
    config = json.loads(Path(update.location, "adapter_config.json").read_text())
    tensors = load_file(file_of(update))
    down, up = (tensors[f"base_model.model.model.q_proj.{part}.weight"] for part in ("lora_A", "lora_B"))
    assert down.shape[0] == config["r"]
    return base + (up @ down) * (config["lora_alpha"] / config["r"])


@pytest.mark.parametrize("first", [0.0, 0.5], ids=["adapters at zero", "adapters trained before"])
def test_adapters_are_put_on_the_full_weights_and_give_the_same_as_merged_ones(tmp_path: Path, first: float) -> None:
    base = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    one = publisher(tmp_path, kinds=("full", "delta", "lora"))
    full = one.publish(merged(base, adapters(first)), 3, adapters=adapters(first))
    assert full.kind == "full"
    for version, value in ((4, 0.7), (8, 0.9), (12, 0.2)):
        update = one.publish(merged(base, adapters(value)), version, adapters=adapters(value))
        assert (update.kind, update.base_policy_version) == ("lora", 3)
        engine = loaded(update, load_file(file_of(full))["model.q_proj.weight"])
        torch.testing.assert_close(engine, merged(base, adapters(value))[0][1], atol=1e-6, rtol=0)
        assert torch.equal(engine, merged(base, adapters(value))[0][1]) or first
    assert names(tmp_path) == ["1-12", "1-3", "1-8"], "an adapter takes the place of the one before"
    last = one.publish(merged(base, adapters(0.2)), 13, adapters=adapters(0.2), is_last=True)
    assert last.kind == "full"
    assert same(load_file(file_of(last)), dict(merged(base, adapters(0.2))))


def test_engines_that_take_no_adapters_get_them_merged(tmp_path: Path) -> None:
    base = torch.zeros(6, 10)
    one = publisher(tmp_path, kinds=("full", "delta"))
    for version, value in ((0, 0.0), (1, 0.5)):
        update = one.publish([*merged(base, adapters(value)), *layers(0)], version, adapters=adapters(value))
    assert update.kind == "delta"
    assert set(load_file(file_of(update))) == {"model.q_proj.weight"}


_WRITER = """
import os, sys, torch
from pathlib import Path
from driftgym.trainer.weights import WeightPublisher

def write(root, incarnation):
    one = WeightPublisher(Path(root), config={}, tokenizer_folder=Path(root), incarnation=incarnation,
                          kinds=("full", "delta"))
    for version in range(10**6):
        changed = range(8) if version % 5 == 4 else [version % 8]
        for index in changed:
            state[index] = float(version)
        tensors = [(f"layer{index}", torch.full((20_000,), value)) for index, value in enumerate(state)]
        update = one.publish(tensors, version)
        os.write(1, f"{version} {update.kind}\\n".encode())

torch.set_num_threads(1)
for line in sys.stdin:
    state = [-1.0] * 8
    child = os.fork()
    if child == 0:
        write(*line.split()[:1], int(line.split()[1]))
    os.write(1, f"pid {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"killed\\n")
"""


def expected_after(version: int) -> dict[str, float]:
    """What the writer above has published with that version, by the name of the tensor."""
    state = [-1.0] * 8
    for each in range(version + 1):
        for index in range(8) if each % 5 == 4 else [each % 8]:
            state[index] = float(each)
    return {f"layer{index}": value for index, value in enumerate(state)}


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_whole_publications_alone(tmp_path: Path) -> None:
    """Thirty times: of what stands, each folder is whole, and the newest leads back to a full one by its chain."""
    draw = random.Random(7)
    seen: set[str] = set()
    with subprocess.Popen([sys.executable, "-P", "-c", _WRITER], stdin=-1, stdout=-1, text=True, bufsize=1) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for incarnation in range(1, 31):
            writer.stdin.write(f"{tmp_path} {incarnation}\n")
            lines = iter(writer.stdout.readline, "")
            said = [next(lines), next(lines)]
            (pid,) = (int(line.split()[1]) for line in said if line.startswith("pid"))
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
            for line in lines:
                if line == "killed\n":
                    break
                said.append(line)
            last = max(int(line.split()[0]) for line in said if not line.startswith("pid"))
            seen |= check_whole(tmp_path, incarnation, at_least=last)
        writer.stdin.close()
    assert seen == {"full", "delta"}


def check_whole(root: Path, incarnation: int, *, at_least: int) -> set[str]:
    """The kinds of what stands; checks that each is whole, and that the newest can be loaded."""
    found: dict[int, WeightUpdate] = {}
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        update = read_publication(path)
        digest = hashlib.sha256(file_of(update).read_bytes()).hexdigest()
        assert update.checksum == f"sha256:{digest}"
        if update.incarnation == incarnation:
            found[update.policy_version] = update
    newest = found[max(found)]
    assert newest.policy_version in (at_least, at_least + 1)
    chain = [newest]
    while chain[0].base_policy_version is not None:
        chain.insert(0, found[chain[0].base_policy_version])
    held = {name: float(tensor[0]) for name, tensor in applied(chain).items()}
    assert held == expected_after(newest.policy_version)
    return {update.kind for update in found.values()}
