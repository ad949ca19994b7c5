"""A training run from its configuration to its summary: what `driftgym train` does."""

import asyncio
import contextlib
import functools
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgym.console import ConsoleSink, print_in_time
from driftgym.errors import ConfigError, DriftgymError, TrainingError
from driftgym.metrics import JsonlWriter, Metrics, WandbSink
from driftgym.sinks import Row, Sink
from driftgym.trainer.journal import Journal, settled
from driftgym.trainer.lineage import lock_run, take_up
from driftgym.trainer.loop import Parts, Trainer
from driftgym.trainer.parts import StartRequest, prepare, start_parts
from driftgym.trainer.publications import is_published
from driftgym.trainer.run_config import RunConfig, check_run_dir, load_resolved, make_run_dir, settings_of
from driftgym.trainer.stop import RunInterruptedError, Stop
from driftgym.trainer.summary import RunClock, make_summary, write_summary

StartParts = Callable[[StartRequest, contextlib.AsyncExitStack], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to.

    >>> RunResult(run_dir=Path("runs/a"), summary={"steps": 3}, rows=[], is_interrupted=False).summary["steps"]
    3
    """

    run_dir: Path
    """The run's folder."""
    summary: dict[str, Any]
    """The content of its summary.json."""
    rows: list[dict[str, Any]]
    """The metrics of every step that stands."""
    is_interrupted: bool
    """True when the user stopped it before `max_steps`."""


async def train(config: RunConfig) -> RunResult:
    """A new run. Everything that can be wrong with `config` is found before anything is started or written.

    Raises:
        ConfigError: the user's input is wrong.
        DriftgymError: the run failed; its folder holds all that was done.
        RunInterruptedError: the user stopped it before it began.
    """
    check_run_dir(config)
    return await _prepared(config, lambda: make_run_dir(config))


async def resume(run_dir: Path) -> RunResult:
    """The next life of the run in `run_dir`, from its newest complete checkpoint. Raises as `train` does."""
    config, run_dir = load_resolved(run_dir)
    return await _prepared(config, lambda: run_dir)


async def _prepared(config: RunConfig, run_dir: Callable[[], Path]) -> RunResult:
    """One life of a run, once all that it asks for was found."""
    stop = Stop()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stop.on_signals(say=_print_error))
        prepared = await stop.or_stop(prepare(config, stack, say=_print_error))
        folder = run_dir()
        try:
            return await live(config, folder, stop=stop, start=functools.partial(start_parts, prepared))
        except ConfigError:
            raise
        except Exception:
            _print_error(f"the run failed; go on from its last checkpoint with: driftgym train --resume {folder}")
            raise


async def live(
    config: RunConfig, run_dir: Path, *, stop: Stop, start: StartParts, sinks: Sequence[Sink] = ()
) -> RunResult:
    """One life of a run: takes up what stands in `run_dir`, starts the parts, trains, closes, sums up.

    Args:
        config: the run.
        run_dir: its folder, made before.
        stop: the user's wish to stop.
        start: starts the parts and leaves their closing to the stack; `parts.start_parts`, or a scripted twin.
        sinks: where metrics go besides those places that `config` names.

    Raises:
        ConfigError: another process has the run, or it began with another `trainer.num_tasks`.
        DriftgymError: the run failed; its folder holds all that was done.
    """
    with _held(run_dir) as journal:
        _check_tasks(config, journal)
        journal.begin_life()
        lineage = take_up(run_dir, journal, config.trainer.lag_rule, say=_print_error)
        rows = journal.step_rows()
        clock = RunClock(rows[-1] if rows else {})
        metrics = Metrics(JsonlWriter(run_dir / "metrics.jsonl"), [*_sinks(config, run_dir, rows), *sinks])
        request = StartRequest(
            config=config,
            run_dir=run_dir,
            lineage=lineage,
            incarnation=journal.incarnation,
            say=metrics.say,
            count=journal.count_event,
        )
        life = _Life(request=request, journal=journal, metrics=metrics, clock=clock, stop=stop)
        try:
            is_interrupted = await life.run(start)
        except BaseException:
            try:
                await life.end()
            except DriftgymError as error:  # what failed first is what ends the run
                _print_error(str(error))
            raise
        summary = await life.end()
        rows = journal.step_rows()
    return RunResult(run_dir=run_dir, summary=summary, rows=rows, is_interrupted=is_interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """One life of a run, taken up and not started.

    >>> _Life.__slots__
    ('request', 'journal', 'metrics', 'clock', 'stop')
    """

    request: StartRequest
    journal: Journal
    metrics: Metrics
    clock: RunClock
    stop: Stop

    async def run(self, start: StartParts) -> bool:
        """Starts the parts, trains, and closes them. True when the user stopped it."""
        request = self.request
        self.metrics.say(f"run: {request.run_dir}")
        if request.config.trainer.group_size == 1:
            self.metrics.say("trainer.group_size: 1 gives every episode the advantage 0: none is there to compare with")
        if self._is_over():
            self.metrics.say(f"step {request.lineage.policy_version} was the last: nothing is left to train")
            return False
        try:
            async with contextlib.AsyncExitStack() as stack:
                parts: Parts = await self.stop.or_stop(start(request, stack))
                await self._trainer(parts).run()
        except RunInterruptedError:
            return True
        return False

    async def end(self) -> dict[str, Any]:
        """Closes the sinks, and writes the summary, which tells what they dropped at the end too.

        Raises:
            TrainingError: it cannot be written.
        """
        config, run_dir = self.request.config, self.request.run_dir
        for line in await asyncio.to_thread(self.metrics.close, timeout_s=config.limits.close_s):
            _print_error(line)
        return _sum_up(self.journal, self.clock, run_dir, self.metrics)

    def _is_over(self) -> bool:
        """No step is left, and the weights of the last one stand: a kill may come between its checkpoint and them."""
        version = self.request.lineage.policy_version
        if version < self.request.config.trainer.max_steps:
            return False
        return is_published(self.request.run_dir / "weights", policy_version=version)

    def _trainer(self, parts: Parts) -> Trainer:
        return Trainer(
            config=self.request.config.trainer,
            parts=parts,
            run_dir=self.request.run_dir,
            lineage=self.request.lineage,
            journal=self.journal,
            metrics=self.metrics,
            clock=self.clock,
            stop=self.stop,
            limits=self.request.config.limits,
        )


def _check_tasks(config: RunConfig, journal: Journal) -> None:
    """Raises ConfigError when the groups that were played so far would be of other tasks."""
    given = config.trainer.num_tasks
    begun = settled(journal, "num_tasks", given or 0) or None
    if begun != given:
        raise ConfigError(
            f"trainer.num_tasks: {given} does not go on with a run that began with {begun}; its groups would be of "
            "other tasks: set it back, or begin a new run"
        )


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[Journal]:
    """The run's journal, while this process alone has the run."""
    lock = lock_run(run_dir)
    try:
        with contextlib.closing(Journal.open(run_dir)) as journal:
            yield journal
    except sqlite3.Error as error:
        raise TrainingError(f"{run_dir / 'journal.sqlite'}: cannot be read ({error})") from None
    finally:
        os.close(lock)


def _sinks(config: RunConfig, run_dir: Path, past: Sequence[Row]) -> list[Sink]:
    sinks: list[Sink] = []
    if sys.stdout is not None:
        sinks.append(ConsoleSink(max_steps=config.trainer.max_steps, past=past))
    if config.metrics.wandb_project is not None:
        settings = settings_of(config)
        sinks.append(WandbSink(config.metrics, run_dir=run_dir, name=run_dir.name, settings=settings))
    return sinks


def _sum_up(journal: Journal, clock: RunClock, run_dir: Path, metrics: Metrics) -> dict[str, Any]:
    summary = make_summary(journal, clock, run_dir=run_dir, dropped_metrics=metrics.dropped_metrics)
    try:
        write_summary(run_dir / "summary.json", summary)
    except OSError as error:
        raise TrainingError(f"{run_dir}/summary.json: cannot be written ({error.strerror})") from None
    return summary


def _print_error(text: str) -> None:
    print_in_time(text, to_stderr=True)
