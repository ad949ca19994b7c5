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

DECISIVE = ("robust", "ppo", "reinforce", "positives only")
HARDER = ("robust", "ppo", "reinforce")


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


def full_matrix() -> list[Cell]:
    """Every cell, those that decide first."""
    rewards: Sequence[Reward] = ("clean", "noisy")
    cells = [
        Cell(arm=arm, gap=gap, reward=reward, level="one_call", seed=0)
        for arm in ARMS
        for reward in rewards
        for gap in GAPS
    ]
    cells += [Cell(arm=arm, gap=gap, reward="clean", level="two_calls", seed=0) for arm in HARDER for gap in GAPS]
    cells += [
        Cell(arm=arm, gap=gap, reward=reward, level="one_call", seed=seed)
        for seed in range(1, NUM_SEEDS)
        for arm in DECISIVE
        for reward in rewards
        for gap in GAPS
    ]
    return [*quick_matrix(), *(cell for cell in cells if cell not in quick_matrix())]


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
