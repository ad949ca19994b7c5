"""Trajectory groups as JSON and back, without loss: what `RUN/trajectories/` holds.

Floats are written as the shortest text that gives the same float64 back, so float32 log-probs return bit by bit (of
a NaN, that it is one); JSON's NaN and Infinity are used as Python writes them. Token arrays are plain lists, so that
any tool reads them.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from driftgym.errors import TrainingError
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
)

_COMPRESSION_LEVEL = 1  # tokens compress nearly as well as at 9, at a third of the time

_TASK_FIELDS = ("task_id", "env_id", "seed", "metadata")
_COMPLETION_FIELDS = ("request_id", "finish_reason", "kv_min_policy_version", "latency_s", "extras")
_COMPLETION_ARRAYS = ("token_ids", "logprobs", "policy_versions")
_TURN_FIELDS = ("reward", "tool_latency_s", "rewrites_context", "is_interrupted")
_TRAJECTORY_FIELDS = (
    "trajectory_id",
    "group_id",
    "member",
    "attempt",
    "task_id",
    "reward",
    "reward_parts",
    "error",
    "started_at",
    "ended_at",
    "events",
)


def write_group(path: Path, group: TrajectoryGroup) -> None:
    """Writes `group` to `path` as gzipped JSON, whole or not at all.

    Raises:
        TrainingError: it holds something that JSON cannot say, or the file cannot be written.
    """
    try:
        text = json.dumps(group_to_json(group), default=_plain, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TrainingError(f"group {group.group_id} cannot be written as JSON: {error}") from None
    temporary = path.with_name(path.name + ".tmp")
    try:
        # mtime 0: the same group gives the same bytes. "surrogatepass": a lone surrogate must come back too.
        temporary.write_bytes(gzip.compress(text.encode("utf-8", "surrogatepass"), _COMPRESSION_LEVEL, mtime=0))
        os.replace(temporary, path)
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written ({error.strerror})") from None


def read_group(path: Path) -> TrajectoryGroup:
    """What `write_group` wrote. Raises TrainingError when the file is missing or damaged."""
    try:
        return group_from_json(json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass")))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: not a readable trajectory file ({error})") from None


def group_to_json(group: TrajectoryGroup) -> dict[str, Any]:
    """`group` as an object that `json` can write."""
    return {
        "group_id": group.group_id,
        "task": _fields(group.task, _TASK_FIELDS) | {"prompt": [_message(m) for m in group.task.prompt]},
        "trajectories": [
            _fields(t, _TRAJECTORY_FIELDS) | {"status": t.status.value, "turns": [_turn(turn) for turn in t.turns]}
            for t in group.trajectories
        ],
    }


def group_from_json(data: Mapping[str, Any]) -> TrajectoryGroup:
    """The group that `group_to_json` wrote."""
    return TrajectoryGroup(
        group_id=data["group_id"],
        task=Task(**_with(data["task"], prompt=lambda ms: tuple(map(_read_message, ms)))),
        trajectories=tuple(
            Trajectory(**_with(t, status=TrajectoryStatus, turns=lambda turns: tuple(map(_read_turn, turns))))
            for t in data["trajectories"]
        ),
    )


def _fields(owner: object, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(owner, name) for name in names}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _with(data: Mapping[str, Any], **readers: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: readers[name](value) if name in readers else value for name, value in data.items()}


def _message(message: Message) -> dict[str, Any]:
    content = message.content if isinstance(message.content, str) else [part.text for part in message.content]
    calls = [_fields(call, ("call_id", "name", "arguments", "parse_error")) for call in message.tool_calls]
    optional = {
        "reasoning": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "tool_calls": calls or None,
    }
    return {"role": message.role, "content": content} | {k: v for k, v in optional.items() if v is not None}


def _read_message(data: Mapping[str, Any]) -> Message:
    return Message(
        **_with(
            data,
            content=lambda c: c if isinstance(c, str) else tuple(TextPart(text=text) for text in c),
            tool_calls=lambda calls: tuple(ToolCall(**call) for call in calls),
        )
    )


def _turn(turn: Turn) -> dict[str, Any]:
    arrays = {name: getattr(turn.completion, name).tolist() for name in _COMPLETION_ARRAYS}
    return _fields(turn, _TURN_FIELDS) | {
        "new_prompt_token_ids": turn.new_prompt_token_ids.tolist(),
        "completion": _fields(turn.completion, _COMPLETION_FIELDS) | arrays,
        "action": _message(turn.action),
        "observation": [_message(m) for m in turn.observation],
    }


def _read_turn(data: Mapping[str, Any]) -> Turn:
    return Turn(
        **_with(
            data,
            completion=lambda c: Completion(**c),
            action=_read_message,
            observation=lambda ms: tuple(map(_read_message, ms)),
        )
    )


def _plain(value: object) -> Any:
    """NumPy's scalars and arrays, and mappings, as JSON knows them."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
