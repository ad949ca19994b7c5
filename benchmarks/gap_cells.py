"""What `gap_tolerance.py` compares: objectives, gaps, rewards, levels and seeds. Data only."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reward = Literal["clean", "noisy"]
Level = Literal["one_call", "two_calls"]

GAPS = (0, 16, 64, 256)
NUM_SEEDS = 3

ARMS: Mapping[str, Mapping[str, Any]] = {
    "robust": {"objective": {"name": "robust"}},
    "ppo": {"objective": {"name": "ppo"}},
    "reinforce": {"objective": {"name": "reinforce"}},
    "positives only": {"objective": {"name": "positives_only"}},
    "tis": {"objective": {"name": "tis"}},
    "decoupled ppo, recomputed": {"objective": {"name": "decoupled_ppo", "proximal": "recomputed"}},
    "decoupled ppo, interpolated": {"objective": {"name": "decoupled_ppo", "proximal": "interpolated"}},
    "cispo": {"objective": {"name": "cispo"}},
    "gspo": {"objective": {"name": "gspo"}, "normalisation": "sequence"},
    "m2po": {"objective": {"name": "m2po"}},
    "topr": {"objective": {"name": "topr"}},
}
"""By the name in the table: what differs in the learner's configuration."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "robust, max_drift 0.05": {"objective": {"name": "robust", "max_drift": 0.05}},
    "robust, max_drift 0.2": {"objective": {"name": "robust", "max_drift": 0.2}},
    "robust, no floor": {"objective": {"name": "robust", "low": 0.0}},
    "robust, no mask": {"objective": {"name": "robust", "max_drift": 100.0}},
    "aipo 2, stale failures left out": {"objective": {"name": "aipo", "cap": 2.0}, "max_failure_drift": 0.1},
    "ppo, stale failures left out": {"objective": {"name": "ppo"}, "max_failure_drift": 0.1},
    "reinforce, stale failures left out": {"objective": {"name": "reinforce"}, "max_failure_drift": 0.1},
}
"""What was tried beside `robust`: its parts one by one."""

ALIKE_ON_POLICY = frozenset(ARMS) - {"robust", "positives only", "gspo"}
"""At gap 0 every ratio is 1: the gradient of these is that of `robust`, whose cell stands for them."""

DECISIVE = ("robust", "ppo", "reinforce", "positives only")
HARDER = ("robust", "ppo", "reinforce")
_KINDS: Sequence[tuple[Reward, Level, Sequence[str]]] = (
    ("clean", "one_call", tuple(ARMS)),
    ("noisy", "one_call", tuple(ARMS)),
    ("clean", "two_calls", HARDER),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run.

    >>> Cell(arm="ppo", gap=64, reward="clean", level="one_call", seed=0).name
    'ppo/64/clean/one_call/0'
    """

    arm: str
    """Which of ARMS."""
    gap: int
    """D: optimizer steps that the behaviour weights are held back."""
    reward: Reward
    """What the learner is told."""
    level: Level
    """Of Lookup-v0."""
    seed: int
    """Of weights, warm-up, tasks, sampling and noise."""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.arm}/{self.gap}/{self.reward}/{self.level}/{self.seed}"


def settings_of(cell: Cell) -> Mapping[str, Any]:
    """What differs in the learner's configuration."""
    return {**ARMS, **VARIANTS}[cell.arm]


def full_matrix() -> list[Cell]:
    """Every cell, those that decide first, and the smallest gap last."""
    cells = quick_matrix()
    for gaps in ((0, 256, 64), (16,)):
        cells += [
            Cell(arm=arm, gap=gap, reward=reward, level=level, seed=seed)
            for seed in range(NUM_SEEDS)
            for gap in gaps
            for reward, level, arms in _KINDS
            for arm in arms
            if _is_wanted(arm, gap=gap, level=level, seed=seed)
        ]
    return list(dict.fromkeys(cells))


def _is_wanted(arm: str, *, gap: int, level: Level, seed: int) -> bool:
    if gap == 0 and arm in ALIKE_ON_POLICY:
        return False
    return seed == 0 or (arm in DECISIVE and level == "one_call")


def variant_matrix() -> list[Cell]:
    """The variants where gaps are large: with noise, and with two calls."""
    kinds: Sequence[tuple[Reward, Level]] = (("noisy", "one_call"), ("clean", "two_calls"))
    return [
        Cell(arm=arm, gap=gap, reward=reward, level=level, seed=0)
        for reward, level in kinds
        for gap in (256, 64)
        for arm in VARIANTS
    ]


def quick_matrix() -> list[Cell]:
    """One seed of the cells that the budgets are about."""
    clean = [Cell(arm="robust", gap=gap, reward="clean", level="one_call", seed=0) for gap in (0, 64, 256)]
    return [
        *clean,
        Cell(arm="robust", gap=256, reward="noisy", level="one_call", seed=0),
        Cell(arm="reinforce", gap=64, reward="clean", level="one_call", seed=0),
        Cell(arm="positives only", gap=256, reward="noisy", level="one_call", seed=0),
    ]


def chosen(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """The cells whose name `pattern` is found in."""
    return [cell for cell in cells if re.search(pattern, cell.name)]
