"""Which objective a run trains with, and its numbers. No torch: the trainer reads this too.

An objective is chosen by its name; what else stands beside the name are the numbers that this objective reads. Their
meaning is that of the keyword arguments of the function of the same name in `driftgym.trainer.objectives`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import pydantic

from driftgym.config import Config

Number: TypeAlias = float | str | None
Normalisation: TypeAlias = Literal["token", "sequence", "prompt", "fixed"]

OBJECTIVE_NUMBERS: Mapping[str, Mapping[str, Number]] = {
    "robust": {"low": 0.5, "cap": 2.0, "max_drift": 0.1},
    "reinforce": {},
    "positives_only": {},
    "ppo": {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0},
    "decoupled_ppo": {"proximal": "recomputed", "eps_low": 0.2, "eps_high": 0.28, "cap": 5.0, "beyond": "drop"},
    "tis": {"cap": 2.0, "level": "token", "eps_low": 0.2, "eps_high": 0.28},
    "mis": {"low": 0.5, "high": 2.0, "level": "sequence", "eps_low": 0.2, "eps_high": 0.28},
    "icepop": {"low": 0.5, "high": 5.0, "level": "token", "eps_low": 0.2, "eps_high": 0.28},
    "aipo": {"cap": 2.0},
    "cispo": {"eps_low": 1.0, "eps_high": 4.0, "beyond": "cut"},
    "topr": {"level": "sequence"},
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "gmpo": {"eps_low": 0.4, "eps_high": 0.4},
    "gepo": {"eps_low": 0.2, "eps_high": 0.2},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "m2po": {"max_m2": 0.04, "form": "mask", "floor_low": 0.3, "floor_high": 0.5},
    "bapo": {"target": 1.0, "dual_clip": 3.0},
    "dppo_tv": {"low": 0.2, "high": 0.2, "tau": 1e-3},
    "ipo": {"high": 0.1, "tau": 1e-3},
    "dppo_kl": {"high": 0.05, "cap": 10.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "opmd": {"tau": 0.1, "form": "sequence"},
    "tba": {"tau": 0.5},
}
"""By the objective's name: the numbers that a configuration may set, and their defaults."""

ObjectiveName: TypeAlias = Literal[
    "robust", "reinforce", "positives_only", "ppo", "decoupled_ppo", "tis", "mis", "icepop", "aipo", "cispo", "topr",
    "gspo", "gmpo", "gepo", "vespo", "m2po", "bapo", "dppo_tv", "ipo", "dppo_kl", "sapo", "opmd", "tba",
]  # fmt: skip

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "proximal": ("recomputed", "interpolated"),
    "beyond": ("cut", "drop"),
    "level": ("token", "sequence", "geometric"),
    "form": ("mask", "outward_mask", "clip", "token", "sequence", "residual"),
}
_CHOICES_OF: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("topr", "level"): ("token", "sequence"),
    ("m2po", "form"): ("mask", "outward_mask", "clip"),
    ("opmd", "form"): ("token", "sequence", "residual"),
}
_MAY_BE_NULL = {("ppo", "dual_clip"), ("decoupled_ppo", "cap")}
_ABOVE_ZERO = {"cap", "max_m2", "tau_pos", "tau_neg"}
_ABOVE_ZERO_OF = {("opmd", "tau"), ("tba", "tau")}  # what rewards are divided by
_BANDS: Mapping[str, tuple[str, str]] = {"robust": ("low", "cap"), "mis": ("low", "high"), "icepop": ("low", "high")}
_LARGEST = 3e38  # in float32
_WHOLE_BATCH = frozenset({"m2po", "bapo", "gepo", "tba", "opmd"})
_WHOLE_SEQUENCES = frozenset({"robust", "gspo", "gmpo", "vespo"})
_ALSO_WITHOUT_ADVANTAGE = frozenset({"dppo_tv", "ipo", "opmd", "tba"})


class ObjectiveConfig(Config, extra="allow"):
    """An objective and its numbers.

    >>> ObjectiveConfig(name="ppo", eps_high=0.3).numbers
    {'eps_low': 0.2, 'eps_high': 0.3, 'dual_clip': 3.0}
    """

    name: ObjectiveName = pydantic.Field(
        "robust", description="Beside it stand the numbers that it reads; see docs/objectives.md."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Puts the defaults beside the name, in their order."""
        if not isinstance(data, dict):
            return data
        name = data.get("name", "robust")
        defaults = OBJECTIVE_NUMBERS.get(name) if isinstance(name, str) else None
        if defaults is None:
            return data  # refused by the type of `name`
        given = {key: value for key, value in data.items() if key != "name"}
        if unknown := sorted(given.keys() - defaults.keys()):
            reads = ", ".join(defaults) or "no number"
            near = difflib.get_close_matches(unknown[0], defaults, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; it reads {reads}"
            raise ValueError(f"objective {name} does not read {unknown[0]}{meant}")
        numbers = {key: _checked(name, key, given[key]) if key in given else value for key, value in defaults.items()}
        _check_band(name, numbers)
        return {"name": name, **numbers}

    @property
    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of the objective's function."""
        return dict(self.model_extra or {})

    @property
    def needs_whole_batch(self) -> bool:
        """True when a token's loss depends on other sequences: then it is computed before the batch is split."""
        return self.name in _WHOLE_BATCH

    @property
    def needs_whole_sequences(self) -> bool:
        """True when a token's loss depends on other tokens of its sequence: its rows are then looked at together."""
        is_named = self.name in _WHOLE_SEQUENCES or self.needs_whole_batch
        return is_named or self.numbers.get("level", "token") != "token"

    @property
    def needs_reference(self) -> bool:
        """True when it reads the log-probs of the reference policy."""
        return self.name == "tba"

    @property
    def moves_without_advantage(self) -> bool:
        """True when a token of advantage 0 may have a gradient."""
        return self.name in _ALSO_WITHOUT_ADVANTAGE


def _checked(name: str, key: str, value: Any) -> Number:
    """`value` as the number `key` of objective `name`. Raises ValueError."""
    if key in _CHOICES:
        choices = _CHOICES_OF.get((name, key), _CHOICES[key])
        if value not in choices:
            raise ValueError(f"objective {name}: {key} must be one of {', '.join(choices)}, got {value!r}")
        return str(value)
    if value is None and (name, key) in _MAY_BE_NULL:
        return None
    number = _number(value)
    if number is None or not 0 <= number <= _LARGEST:
        raise ValueError(f"objective {name}: {key} must be a number of at least 0, got {value!r:.80}")
    least = 1.0 if key == "dual_clip" else 0.0
    is_above = key in {"dual_clip", *_ABOVE_ZERO} or (name, key) in _ABOVE_ZERO_OF
    if is_above and number <= least:
        raise ValueError(f"objective {name}: {key} must be above {least:g}, got {value!r}")
    return number


def _number(value: Any) -> float | None:
    """`value` as a number: YAML reads 3e-4, which has no point, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _check_band(name: str, numbers: Mapping[str, Any]) -> None:
    """Raises ValueError where the lower bound of a ratio is above the upper one: nothing would be trained."""
    low, high = _BANDS.get(name, ("", ""))
    if low and numbers[low] > numbers[high]:
        raise ValueError(f"objective {name}: {low} must not be above {high}, got {numbers[low]} and {numbers[high]}")


KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "k3_straight_through"]


class KlConfig(Config):
    """A pull towards the reference policy: the weights that RL began with."""

    coef: float = pydantic.Field(gt=0, description="Weight of the term.")
    estimator: KlEstimator = pydantic.Field(
        "k2", description="See objectives.kl; in the loss, k1 has no gradient in expectation."
    )
    place: Literal["loss", "reward"] = pydantic.Field(
        "loss", description="`loss` adds the term to each token's loss; `reward` takes it (k1) off the advantages."
    )
