"""What went wrong, counted by whose fault it was, and what else happened that a run's summary tells."""

from collections import Counter
from collections.abc import Mapping

from driftgym.types import TrajectoryStatus

_EVENT = "events/"
_ERRORS = {TrajectoryStatus.ENV_ERROR: "errors_env", TrajectoryStatus.INFRA_ERROR: "errors_infra"}


class Tally:
    """Running counts over episodes.

    >>> tally = Tally()
    >>> tally.add(status="env_error", events={"policy_error": 2})
    >>> tally.errors
    {'env': 1, 'infra': 0, 'policy': 2}
    >>> tally.events
    {'policy_error': 2}
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, *, status: str, events: Mapping[str, int], num_retries: int = 0) -> None:
        """Counts one episode: how it ended, its events, and the attempts before it that infrastructure failed."""
        if status in _ERRORS:
            self._counts[_ERRORS[TrajectoryStatus(status)]] += 1
        if status == TrajectoryStatus.TRUNCATED_TIME:
            self._counts[_EVENT + "truncated_time"] += 1
        self._counts[_EVENT + "infra_retries"] += num_retries
        self._counts["errors_policy"] += events.get("policy_error", 0)
        for name, count in events.items():
            self._counts[_EVENT + name] += count

    def count(self, event: str, times: int = 1) -> None:
        """Counts what happened to the run rather than to one episode."""
        self._counts[_EVENT + event] += times

    @property
    def errors(self) -> dict[str, int]:
        """Episodes that the environment or the infrastructure ended, and errors of the policy, which end none."""
        return {fault: self._counts[f"errors_{fault}"] for fault in ("env", "infra", "policy")}

    @property
    def events(self) -> dict[str, int]:
        """How often each event happened."""
        return {
            name.removeprefix(_EVENT): n for name, n in sorted(self._counts.items()) if name.startswith(_EVENT) and n
        }

    def row(self) -> dict[str, int]:
        """All counts under flat names, for the row of a step."""
        errors = {f"errors_{fault}": count for fault, count in self.errors.items()}
        return errors | {_EVENT + name: count for name, count in self.events.items()}
