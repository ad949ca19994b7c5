"""`ToolEnv`: the contract of an environment.

The async core is `areset`, `astep`, `grade` and `aclose`; the runner calls these. Gymnasium's synchronous methods
bridge to them through one background event loop, so `gymnasium.make` and its checker see an ordinary environment
whose action and observation are text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftgym.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """How an episode begins.

    >>> ResetResult(messages=(Message(role="user", content="Who?"),)).messages[0].text
    'Who?'
    """

    messages: tuple[Message, ...]
    """The first prompt, without the tools, which the environment's `tools` tell."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the record keeps and the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's reply to one action.

    >>> StepResult(messages=(), terminated=True).terminated
    True
    """

    messages: tuple[Message, ...]
    """What the agent reads next; one tool message per call, in the order of the calls."""
    terminated: bool = False
    """True when the episode is over."""
    reward: float = 0.0
    """The reward of this turn alone; the episode's reward is the grade's."""
    events: Mapping[str, int] = field(default_factory=dict)
    """What happened that a run's summary counts: `tool_timeout`, `tool_output_truncated`, `policy_error`,
    `unknown_tool`, ..."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the record keeps and the agent does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What an episode was worth.

    >>> Grade(reward=1.0, parts={"answer": 1.0}).reward
    1.0
    """

    reward: float
    """The trajectory's reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of it."""
