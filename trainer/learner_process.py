"""The process of a learner: it answers the trainer's calls, alone or as one of several that train a model together.

`python -m driftgym.trainer.learner_process` speaks `driftgym.processes` on its standard input and output; the calls are
those of `training_client.ProcessTrainingClient`, after a first `start`. With `learner.num_processes` above 1 it starts
further ones, `python -m driftgym.trainer.learner_process RANK`, whose `Learner`s take their part in every call.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from driftgym.errors import DriftgymError, TrainingError
from driftgym.processes import serve_calls
from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import LearnerSpec
from driftgym.trainer.model_loading import compute_in_words
from driftgym.trainer.rank_processes import RankProcesses
from driftgym.trainer.ranks import ALONE, Rendezvous, join, leave

_MODULE = "driftgym.trainer.learner_process"
_CALLS = ("forward_backward", "optim_step", "publish", "save", "load", "warm_up")


class LearnerProcess:
    """The calls that a process answers: `start` first, then those of the learner that it makes.

    The first of several carries each call to the others, which answer it too.
    """

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._learner: Learner | None = None
        self._ranks = ALONE
        self._others: RankProcesses | None = None
        self._rendezvous: Rendezvous | None = None

    @property
    def learner(self) -> Learner | None:
        """None before `start`."""
        return self._learner

    def start(self, spec: LearnerSpec) -> str:
        """Makes the learner, with as many processes as configured. Returns what it computes in, in words."""
        if spec.config.num_processes > 1 and self._rank == 0 and self._others is None:
            self._meet(spec.config.num_processes)
        computation: str = self._carried("start", self._start, spec)
        return computation

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """By name."""
        own: dict[str, Callable[..., Any]] = {"start": self.start, "ready": _ready, "join": self._join}
        return own | {name: functools.partial(self._carried, name, self._forward(name)) for name in _CALLS}

    def is_out_of_step(self, error: Exception) -> bool:
        """True for an error of this process alone, which the first waits for until it ends."""
        return self._rank > 0 and not isinstance(error, DriftgymError)

    def close(self) -> None:
        """Ends the other processes."""
        if self._others is not None:
            self._others.close()
        leave()

    def _meet(self, num_processes: int) -> None:
        self._others = RankProcesses.start(_MODULE, num=num_processes - 1)
        self._others.carry("ready", _ready)  # one that cannot start is not waited for where all meet
        self._rendezvous = Rendezvous(size=num_processes)
        self._others.carry("join", self._join, self._rendezvous.port, num_processes)

    def _join(self, port: int, size: int) -> None:
        self._ranks = join(port=port, rank=self._rank, size=size)

    def _start(self, spec: LearnerSpec) -> str:
        torch.set_num_threads(spec.config.num_threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._learner = Learner(spec, ranks=self._ranks)
        return compute_in_words(self._learner.model)

    def _carried(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if self._others is None else self._others.carry(name, call, *args, **kwargs)

    def _forward(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._learner is None:
                raise TrainingError(f"the learner was asked for {name} before start")
            takes_part = name == "publish" and not self._ranks.is_first  # by its parts alone: the first writes
            method = self._learner.lend_weights if takes_part else getattr(self._learner, name)
            return method(*args, **kwargs)

        return call


def _ready() -> None:
    """Says that this process has begun."""


if __name__ == "__main__":
    process = LearnerProcess(rank=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    serve_calls(process.methods(), ends_after=process.is_out_of_step)
    process.close()
    sys.stdout.flush()
    os._exit(0)  # what is left is memory, and to take torch apart in order takes seconds
