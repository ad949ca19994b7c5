"""A learner and an embedded engine in one process, on one copy of the weights; they take turns.

`python -m driftgym.trainer.colocated` answers the calls of `learner_process`, and `serve`, which starts the engine in a
thread of its own. Whatever computes gradients or changes weights holds the engine: what runs there ends first, what
comes waits. After an optimizer step the engine waits on, until the publication of these weights is taken by their name.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.embedded.server import make_engine
from driftgym.agents.generators.embedded.shared import SharedEngine
from driftgym.agents.generators.embedded.threaded import EngineThread
from driftgym.agents.generators.launch import GeneratorConfig
from driftgym.errors import TrainingError
from driftgym.processes import serve_calls
from driftgym.trainer.colocated_client import CHANGE_WEIGHTS, TAKE_THE_TURN
from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import LearnerSpec
from driftgym.trainer.learner_process import LearnerProcess
from driftgym.types import Segment, WeightUpdate

_CLOSE_S = 5.0


class ColocatedProcess:
    """The calls that the process answers: those of the learner, and `serve`.

    Each call is told whether another one waits for its end: what was submitted without waiting in between has one turn.
    """

    def __init__(self) -> None:
        """Without a learner; see `methods`."""
        self._process = LearnerProcess()
        self._spec: LearnerSpec
        self._engine: EngineThread | None = None

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """By name."""
        calls = dict(self._process.methods())
        calls |= {"start": self._start, "warm_up": self._warm_up, "publish": self._publish, "serve": self._serve}
        return {name: functools.partial(self._in_turn, name, call) for name, call in calls.items()}

    def close(self) -> None:
        """Ends the engine; requests under way get no answer."""
        if self._engine is not None:
            self._engine.close(timeout_s=_CLOSE_S)

    def _in_turn(
        self, name: str, call: Callable[..., Any], *args: Any, is_followed: bool = False, **kwargs: Any
    ) -> Any:
        if self._engine is None:
            return call(*args, **kwargs)
        try:
            if name in TAKE_THE_TURN:
                self._engine.hold()
            return call(*args, **kwargs)
        finally:
            # Also where it failed: the version then says that the weights are as before.
            if name in CHANGE_WEIGHTS:
                self._engine.weights_changed(self._version)
            if not is_followed:
                self._engine.let_go()

    @property
    def _learner(self) -> Learner:
        if self._process.learner is None:
            raise TrainingError("the learner was asked for something before start")
        return self._process.learner

    @property
    def _version(self) -> str:
        """The name of the weights that there are."""
        version = WeightVersion(incarnation=self._spec.incarnation, policy_version=self._learner.policy_version)
        return str(version)

    def _start(self, spec: LearnerSpec) -> str:
        computation = self._process.start(spec)
        self._spec = spec
        return computation

    def _serve(self, config: GeneratorConfig) -> str:
        """Serves the learner's model as it stands, not copied. Returns the server's root."""
        if self._engine is not None:
            raise TrainingError("the model is served already")
        folder = str(self._spec.model_folder)
        engine = make_engine(
            SharedEngine,
            self._learner.model,
            model_path=folder,
            max_batch_size=config.max_batch_size,
            max_context_tokens=config.max_context_tokens,
            weight_version=self._version,
        )
        self._engine = EngineThread.start(engine, model_path=folder, num_threads=config.num_threads)
        return self._engine.url

    def _warm_up(self, segments: list[Segment]) -> Mapping[str, float]:
        if self._engine is not None:
            raise TrainingError("warm_up comes before serve: it changes the weights, and leaves their version at 0")
        return self._learner.warm_up(segments)

    def _publish(self, folder: Path, *, is_last: bool = False) -> WeightUpdate:
        """On disk before `serve` and at the end; in between the engine has the weights already."""
        learner = self._learner
        if self._engine is None or is_last:
            return learner.publish(folder, is_last=is_last)
        return WeightUpdate(
            policy_version=learner.policy_version,
            incarnation=self._spec.incarnation,
            location=self._engine.url,
            checksum="",
            transport="tensor",
        )


if __name__ == "__main__":
    process = ColocatedProcess()
    serve_calls(process.methods())
    process.close()
