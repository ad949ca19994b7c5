"""`TrainerConfig`: how rollouts and optimizer steps go together."""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from driftgym.agents.generators.base import WeightUpdateMode
from driftgym.config import Config
from driftgym.trainer.advantages import AdvantageMethod
from driftgym.trainer.credit import Credit
from driftgym.trainer.segments import ZeroVariance
from driftgym.trainer.staleness import LagRule, OnLag

_SETTLED: Mapping[str, Mapping[str, Any]] = {
    "mode sync": {"max_lag": 0, "weight_update": "drain", "publish_every_steps": 1},
    "mode one_step_off": {"max_lag": 1, "publish_every_steps": 1},
    "placement colocated": {"weight_update": "drain", "publish_every_steps": 1},
}
"""What a choice leaves no choice about."""


class TrainerConfig(Config):
    """How rollouts and optimizer steps go together."""

    mode: Literal["async", "sync", "one_step_off"] = pydantic.Field(
        "async",
        description="`sync` generates a batch with the newest weights, then trains it, in turn; it settles max_lag, "
        "weight_update and publish_every_steps. `one_step_off` generates the next batch while one is trained; it "
        "settles max_lag and publish_every_steps.",
    )
    placement: Literal["disaggregated", "colocated"] = pydantic.Field(
        "disaggregated",
        description="`colocated`: the learner's process generates too, on the same weights; the two take turns. It "
        "settles weight_update and publish_every_steps.",
    )
    max_steps: int = pydantic.Field(100, gt=0, description="The run ends with this policy version.")
    groups_per_step: int = pydantic.Field(4, gt=0)
    group_size: int = pydantic.Field(8, gt=0, description="Episodes of the same task.")
    max_lag: int = pydantic.Field(8, ge=0, description="No token is trained with a lag above it.")
    on_lag: OnLag = pydantic.Field(
        "wait",
        description="At the bound: wait for the group that is due, mask old tokens, drop groups with one.",
    )
    max_in_flight_groups: int = pydantic.Field(
        16, gt=0, description="Groups being played, or finished and not yet taken by a step."
    )
    publish_every_steps: int = pydantic.Field(
        4, gt=0, description="Steps between two publications; each makes generators compute their KV cache anew."
    )
    weight_update: WeightUpdateMode = pydantic.Field(
        "in_flight",
        description="`in_flight`: running requests go on with the new weights; `drain`: they end with the old ones "
        "first; `abort_resume`: they are cut, and asked for again from the tokens that they have.",
    )
    checkpoint_every_steps: int = pydantic.Field(50, gt=0)
    advantage: AdvantageMethod = pydantic.Field("group_mean", description="See advantages.py.")
    credit: Credit = pydantic.Field(
        "episode", description="`turn`: a turn is credited with the turn rewards from it on, beside the grade."
    )
    zero_variance: ZeroVariance = pydantic.Field(
        "keep",
        description="Groups whose advantages are all 0: `keep` them in the denominators of the loss, or `filter` them "
        "out of the batch before.",
    )
    num_tasks: int | None = pydantic.Field(
        None, gt=0, description="Play the first so many tasks, over and over; null: no task twice."
    )
    solved_above: float | None = pydantic.Field(
        None,
        description="A task is not played again once the scored members of one of its groups had a mean reward of at "
        "least this; null: it is.",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_what_is_settled(cls, data: Any) -> Any:
        """What mode and placement settle need not be given."""
        if not isinstance(data, dict):
            return data
        settled = [_SETTLED.get(f"{key} {data.get(key)}", {}) for key in ("placement", "mode")]
        return {**settled[0], **settled[1], **data}

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TrainerConfig":
        settled = [self._settled_problem(f"{key} {getattr(self, key)}") for key in ("mode", "placement")]
        for problem in (*settled, self._sync_problem(), self._async_problem(), self._tasks_problem()):
            if problem:
                raise ValueError(problem)
        return self

    def _settled_problem(self, choice: str) -> str | None:
        settled = _SETTLED.get(choice, {})
        if all(getattr(self, name) == value for name, value in settled.items()):
            return None
        needs = ", ".join(f"{name}: {value}" for name, value in settled.items())
        return f"{choice} needs {needs}; set them so, or leave them out"

    def _sync_problem(self) -> str | None:
        if self.mode == "sync" and self.on_lag != "wait":
            return f"mode sync goes with on_lag: wait; {self.on_lag} would leave out what the last weights wrote"
        return None

    def _async_problem(self) -> str | None:
        if self.publish_every_steps > self.max_lag + 1:
            return (
                f"publish_every_steps {self.publish_every_steps} is above max_lag + 1 = {self.max_lag + 1}: generators "
                "would hold weights too old to train on; raise max_lag or publish more often"
            )
        if self.max_in_flight_groups < self.groups_per_step:
            return (
                f"max_in_flight_groups {self.max_in_flight_groups} is below groups_per_step {self.groups_per_step}: "
                "no step could be filled"
            )
        return None

    def _tasks_problem(self) -> str | None:
        if self.solved_above is not None and self.num_tasks is None:
            return "solved_above goes with num_tasks: without it no task comes a second time; set num_tasks"
        if self.advantage == "max_rl" and self.credit == "turn":
            return "advantage max_rl goes with credit: episode; it divides by a mean, which turn rewards may make 0"
        return None

    @property
    def lag_rule(self) -> LagRule:
        """The lag rule of this run."""
        return LagRule(max_lag=self.max_lag, groups_per_step=self.groups_per_step, on_lag=self.on_lag)
