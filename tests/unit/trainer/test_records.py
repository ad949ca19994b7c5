"""Trajectory files: what is written comes back bit by bit."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgym.errors import TrainingError
from driftgym.trainer.records import group_from_json, group_to_json, read_group, write_group
from driftgym.types import (
    Completion,
    Message,
    Task,
    TextPart,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
    float32_array,
    int32_array,
)

texts = st.text(st.characters(), max_size=12)  # lone surrogates included: a replaced byte can leave one
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.one_of(
    st.builds(ToolCall, call_id=texts, name=texts, arguments=st.dictionaries(texts, json_values, max_size=2)),
    st.builds(ToolCall, call_id=texts, name=texts, arguments=st.none(), parse_error=texts),
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts | st.lists(st.builds(TextPart, text=texts), max_size=2).map(tuple),
    reasoning=st.none() | texts,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    length = draw(st.integers(0, 4))
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    return Completion(
        request_id=draw(texts),
        token_ids=int32_array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))),
        logprobs=float32_array(draw(st.lists(floats, min_size=length, max_size=length))),
        policy_versions=int32_array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        kv_min_policy_version=draw(st.none() | st.integers(0, 9)),
        latency_s=draw(st.floats(0, 100)),
        extras=draw(st.dictionaries(texts, json_values, max_size=2)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    status = draw(st.sampled_from(TrajectoryStatus))
    turns = st.builds(
        Turn,
        new_prompt_token_ids=st.lists(st.integers(0, 99), max_size=3).map(int32_array),
        completion=completions(),
        action=messages,
        observation=st.lists(messages, max_size=2).map(tuple),
        reward=st.floats(-1, 1),
        tool_latency_s=st.floats(0, 9),
        rewrites_context=st.booleans(),
        is_interrupted=st.booleans(),
    )
    return Trajectory(
        trajectory_id=draw(texts),
        group_id="g",
        member=draw(st.integers(0, 9)),
        attempt=draw(st.integers(0, 3)),
        task_id=draw(texts),
        turns=tuple(draw(st.lists(turns, max_size=2))),
        status=status,
        reward=draw(st.floats(-1, 1)) if status.is_scored else None,
        reward_parts=draw(st.dictionaries(texts, st.floats(-1, 1), max_size=2)),
        error=draw(st.none() | texts),
        started_at=draw(st.floats(0, 2e9)),
        ended_at=draw(st.floats(0, 2e9)),
        events=draw(st.dictionaries(texts, st.integers(0, 9), max_size=2)),
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    task = Task(
        task_id=draw(texts),
        env_id=draw(texts),
        prompt=tuple(draw(st.lists(messages, max_size=2))),
        seed=draw(st.integers(0, 2**31)),
        metadata=draw(st.dictionaries(texts, json_values, max_size=2)),
    )
    return TrajectoryGroup(group_id="g", task=task, trajectories=tuple(draw(st.lists(trajectories(), max_size=2))))


def plain(value: Any) -> Any:
    """A frozen record as values that compare: arrays by type and bytes, so that NaN equals itself, of any payload."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            value = np.where(np.isnan(value), np.float32(np.nan), value)
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "__dataclass_fields__"):
        return (type(value).__name__, {name: plain(getattr(value, name)) for name in value.__dataclass_fields__})
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


@settings(max_examples=60, deadline=None)
@given(group=groups())
def test_a_group_comes_back_bit_by_bit(group: TrajectoryGroup, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "g.json.gz"
    write_group(path, group)
    assert plain(read_group(path)) == plain(group)
    assert plain(group_from_json(group_to_json(group))) == plain(group)


def small_group(**task_fields: Any) -> TrajectoryGroup:
    task = Task(task_id="t", env_id="e", **task_fields)
    return TrajectoryGroup(group_id="g", task=task, trajectories=())


def test_numpy_values_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "g.json.gz"
    write_group(path, small_group(metadata={"level": np.int64(3), "weights": np.array([1.5, 2.0])}))
    assert read_group(path).task.metadata == {"level": 3, "weights": [1.5, 2.0]}


def test_what_json_cannot_say_is_a_clear_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="group g cannot be written as JSON: object"):
        write_group(tmp_path / "g.json.gz", small_group(metadata={"what": object()}))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot be written"):
        write_group(tmp_path / "missing" / "g.json.gz", small_group())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"nonsense" * 9,
        lambda data: gzip.compress(b"[1, 2"),
        lambda data: gzip.compress(json.dumps({"group_id": "g"}).encode()),
        lambda data: gzip.compress(b"\xff\xfe"),
    ],
)
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "g.json.gz"
    write_group(path, small_group())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TrainingError, match="not a readable trajectory file"):
        read_group(path)
