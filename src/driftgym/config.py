"""Configuration: frozen pydantic models, YAML files, `key.path=value` overrides, one-line errors.

Each class that needs configuring has its own `Config` beside it; this module holds the base, the deadlines that
every layer shares, and the reading of files.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from driftgym.errors import ConfigError

_ConfigT = TypeVar("_ConfigT", bound="Config")


class Config(pydantic.BaseModel):
    """Base of every configuration: frozen, unknown keys and figures that are not finite refused, defaults checked."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


class Limits(Config):
    """The deadline of every layer, in seconds. Nothing waits without one."""

    tool_call_s: float = pydantic.Field(10.0, gt=0, description="One tool call; then the agent reads a timeout.")
    generation_s: float = pydantic.Field(120.0, gt=0, description="One generation request.")
    episode_s: float = pydantic.Field(
        600.0, gt=0, description="One episode; stands still while its request is queued or paused."
    )
    grade_s: float = pydantic.Field(60.0, gt=0, description="Grading one episode.")
    sandbox_start_s: float = pydantic.Field(60.0, gt=0, description="Starting one box.")
    weight_update_s: float = pydantic.Field(120.0, gt=0, description="All generators taking new weights.")
    learner_s: float = pydantic.Field(
        1800.0, gt=0, description="One call of the learner: a step, a warm-up, a checkpoint; then it is killed."
    )
    close_s: float = pydantic.Field(10.0, gt=0, description="Closing any one part when the run ends.")


def load_config(config_type: type[_ConfigT], path: Path, overrides: Iterable[str] = ()) -> _ConfigT:
    """The configuration in the YAML file `path`, with `overrides` ("key.path=value", the value in YAML) applied.

    Raises:
        ConfigError: the file is missing or is no YAML mapping, a key is unknown, a value has the wrong type.
            The message names the file, the key, and what would be right.
    """
    data = _read_mapping(path)
    for override in overrides:
        _apply_override(data, override)
    return parse_config(config_type, data, source=str(path))


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Words of the form `key.path=value`, the value in YAML, as nested mappings. Raises ConfigError.

    >>> parse_overrides(["level=two_calls", "faults.hang=0.1"])
    {'level': 'two_calls', 'faults': {'hang': 0.1}}
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
    return data


def parse_config(config_type: type[_ConfigT], data: Mapping[str, Any], *, source: str) -> _ConfigT:
    """`data` as a `config_type`. Raises ConfigError with one line that names `source` and the key."""
    try:
        return config_type.model_validate(dict(data))
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(config_type, error, source)) from None


def dump_config(config: Config) -> str:
    """`config` as YAML, every default included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; give the path of a YAML file") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{path}: not YAML{where}: {problem}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of keys to values, holds {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key_path, equals, raw = override.partition("=")
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: write it as key.path=value, as in trainer.max_steps=20")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not YAML") from None
    node = data
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {key!r} holds a value, not a section")
        node = child
    node[keys[-1]] = value


def _one_line(config_type: type[Config], error: pydantic.ValidationError, source: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "extra_forbidden":
        allowed = _keys_at(config_type, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(allowed)) or 'none'}"
        message = f"unknown key; {hint}"
    else:
        given = first.get("input")
        message = first["msg"].removeprefix("Value error, ")
        if not isinstance(given, Mapping):  # a section as a whole would say nothing
            message += f" (given: {given!r:.80})"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{source}: {key}: {message}{more}"


def _keys_at(config_type: type[Config], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the section at `location` knows; empty when it is not a section of its own.

    Of a section that is one of several kinds, the location names the kind after the key.
    """
    sections: list[type[Config]] = [config_type]
    for part in location:
        annotations = [
            section.model_fields[str(part)].annotation for section in sections if part in section.model_fields
        ]
        if annotations:
            sections = [section for annotation in annotations for section in _sections_of(annotation)]
        else:
            sections = [s for s in sections if any(field.default == part for field in s.model_fields.values())]
    return [key for section in sections for key in section.model_fields]


def _sections_of(annotation: Any) -> list[type[Config]]:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [each for each in candidates if isinstance(each, type) and issubclass(each, Config)]
