"""What a run that was killed must have left: each question is asked of its files alone, not of what wrote them.

The strongest is the replay. A learner begins where the run began and is given, step after step, what the journal says
that the step trained and the records say that was played. It must come to the weights that the run published last; and
each token, scored by the replayed weights of its version, must have the log-prob that was recorded. A group that was
trained twice or not at all, a token of a lost life, an optimizer that was not taken up whole: each shows in one of the
two.
"""

import contextlib
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from kill_run import half_written_in, read_rows

from driftgym.trainer.batching import Row, micro_batch, score_tokens
from driftgym.trainer.checkpoint import newest_complete
from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import LearnerSpec
from driftgym.trainer.model_loading import load_model
from driftgym.trainer.publications import read_publication
from driftgym.trainer.records import read_group
from driftgym.trainer.run_config import RunConfig, load_resolved
from driftgym.trainer.segments import batch_segments
from driftgym.types import Segment, TrajectoryGroup

MAX_WEIGHT_DIFFERENCE = 1e-5
MAX_LOGPROB_DIFFERENCE = 1e-3
_ROWS_AT_ONCE = 32
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run left behind."""

    run_dir: Path
    config: RunConfig
    steps: Sequence[Sequence[TrajectoryGroup]]
    """The groups that each step trained, in the order in which it took them."""
    lag_counts: Sequence[Counter[int]]
    """[steps] tokens by lag that the step gave the learner, as it noted then."""
    journal_rows: Sequence[Mapping[str, Any]]
    """[steps] the metrics that the journal has."""

    @classmethod
    def of(cls, run_dir: Path) -> "Evidence":
        """Reads it."""
        config, run_dir = load_resolved(run_dir)
        with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
            steps = journal.execute("SELECT step, row, lag_counts FROM steps ORDER BY step").fetchall()
            taken = journal.execute(
                "SELECT step, group_id FROM groups WHERE state = 'trained' ORDER BY min_policy_version, task_index"
            ).fetchall()
        groups: dict[int, list[TrajectoryGroup]] = {step: [] for step, _, _ in steps}
        for step, group_id in taken:
            groups.setdefault(step, []).append(read_group(run_dir / "trajectories" / f"{group_id}.json.gz"))
        return cls(
            run_dir=run_dir,
            config=config,
            steps=[groups[step] for step in sorted(groups)],
            lag_counts=[Counter(dict(enumerate(json.loads(counts)))) for _, _, counts in steps],
            journal_rows=[json.loads(row) for _, row, _ in steps],
        )


def budget(name: str, value: float, at_most: float = 0) -> dict[str, Any]:
    """A line of the JSON."""
    return {"name": name, "value": value, "budget": at_most, "ok": value <= at_most}


def checks(evidence: Evidence) -> list[dict[str, Any]]:
    """Everything but the replay."""
    run_dir, max_lag = evidence.run_dir, evidence.config.trainer.max_lag
    lags = [lags_of(groups, now=now) for now, groups in enumerate(evidence.steps)]
    at_odds = [
        ((noted - found) + (found - noted)).total() for noted, found in zip(evidence.lag_counts, lags, strict=True)
    ]
    return [
        budget("groups and members not trained exactly once", num_not_once(evidence)),
        budget("tokens at odds: given to the learner, and played", sum(at_odds)),
        budget("largest lag of a trained token", max(lag for each in lags for lag in each), max_lag),
        budget("tokens of versions to come", sum(n for each in lags for lag, n in each.items() if lag < 0)),
        budget("rows of metrics lost, doubled or out of order", num_wrong_rows(evidence)),
        budget("files and folders left behind", len(left_behind(run_dir))),
        budget("last weights that are missing", int(last_weights(evidence) is None)),
    ]


def num_not_once(evidence: Evidence) -> int:
    """Members of groups, and groups of steps, that are missing, doubled or too many."""
    trainer = evidence.config.trainer
    wrong = abs(len(evidence.steps) - trainer.max_steps)
    members: Counter[tuple[str, int]] = Counter()
    for groups in evidence.steps:
        wrong += abs(len(groups) - trainer.groups_per_step)
        members.update((t.group_id, t.member) for group in groups for t in group.trajectories)
        wrong += sum(len(group.trajectories) != trainer.group_size for group in groups)
    return wrong + sum(count - 1 for count in members.values())


def lags_of(groups: Sequence[TrajectoryGroup], *, now: int) -> Counter[int]:
    """Sampled tokens of scored episodes by lag, at policy version `now`."""
    turns = [turn for group in groups for t in group.trajectories if t.status.is_scored for turn in t.turns]
    return Counter(lag for turn in turns for lag in (now - turn.completion.policy_versions).tolist())


def num_wrong_rows(evidence: Evidence) -> int:
    """Rows that stand and should not, do not and should, or stand out of order, over both files."""
    rows = read_rows(evidence.run_dir / "metrics.jsonl")
    lost = read_rows(evidence.run_dir / "metrics.lost.jsonl")
    incarnations = [row["incarnation"] for row in rows]
    wrong = int([row["step"] for row in rows] != list(range(1, evidence.config.trainer.max_steps + 1)))
    wrong += int(incarnations != sorted(incarnations)) + sum(row["policy_version"] != row["step"] for row in rows)
    kept = [{name: value for name, value in row.items() if name != "dropped_metrics"} for row in rows]
    wrong += sum(row != noted for row, noted in zip(kept, evidence.journal_rows, strict=False))
    written = Counter((row["incarnation"], row["step"]) for row in rows + lost)
    wrong += sum(count - 1 for count in written.values())
    for incarnation in {incarnation for incarnation, _ in written}:
        steps = sorted(step for life, step in written if life == incarnation)
        wrong += steps[-1] - steps[0] + 1 - len(steps)
    return wrong


def left_behind(run_dir: Path) -> list[str]:
    """What a life left that the next one should have taken away: half of something, and weights out of use."""
    found = list(half_written_in(run_dir))
    updates = [read_publication(path) for path in (run_dir / "weights").iterdir() if path.name[0] != "."]
    newest = sorted(updates, key=lambda update: (update.incarnation, update.policy_version))[-2:]
    needed = {(update.incarnation, update.policy_version) for update in newest}
    for update in sorted(updates, key=lambda update: -update.policy_version):
        if (update.incarnation, update.policy_version) in needed and update.base_policy_version is not None:
            needed.add((update.incarnation, update.base_policy_version))
    found += [update.location for update in updates if (update.incarnation, update.policy_version) not in needed]
    names = sorted(os.listdir(run_dir / "checkpoints"))
    return found + [name for name in names if not name.isdigit()] + names[:-2]


def last_weights(evidence: Evidence) -> Path | None:
    """The folder of the weights of the last step, as a whole model; None when they do not stand."""
    folders = (evidence.run_dir / "weights").glob(f"*-{evidence.config.trainer.max_steps}")
    return next((path for path in folders if (path / "model.safetensors").is_file()), None)


def replay(evidence: Evidence) -> list[dict[str, Any]]:
    """Trains again what the run trained: see the module."""
    config = evidence.config
    torch.set_num_threads(config.learner.num_threads)
    folder = Path(config.model.path)
    learner = Learner(
        LearnerSpec(
            model=config.model,
            model_folder=folder,
            config=config.learner,
            warmup=config.warmup,
            seed=config.seed,
            temperature=config.agent.temperature,
            incarnation=1,
        )
    )
    scorer = load_model(config.model, folder, seed=config.seed, device=_CPU).eval()
    batches = [
        batch_segments(each, method=config.trainer.advantage, credit=config.trainer.credit) for each in evidence.steps
    ]
    worst = 0.0
    first = {name: tensor.detach().clone() for name, tensor in learner.weights()}
    for now, segments in enumerate(batches):
        scorer.load_state_dict(dict(learner.weights()), strict=False)
        written = [s for each in batches[now:] for s in each if (s.policy_versions[s.loss_mask] == now).any()]
        worst = max(worst, logprob_difference(scorer, written, version=now, temperature=config.agent.temperature))
        learner.train_step(segments)
    has_moved = any(not torch.equal(first[name], tensor) for name, tensor in learner.weights())
    return [
        budget("replays that changed no weight, and show nothing", int(not has_moved)),
        budget("largest difference of a log-prob from the replay's", worst, MAX_LOGPROB_DIFFERENCE),
        budget(
            "largest difference of a weight from the replay's",
            weight_difference(learner, evidence),
            MAX_WEIGHT_DIFFERENCE,
        ),
    ]


@torch.no_grad()
def logprob_difference(model: Any, segments: Sequence[Segment], *, version: int, temperature: float) -> float:
    """The largest, of the tokens of that version, between what `model` says and what was recorded."""
    worst = 0.0
    for start in range(0, len(segments), _ROWS_AT_ONCE):
        rows = [Row(segment=segment, token_weight=1.0) for segment in segments[start : start + _ROWS_AT_ONCE]]
        batch = micro_batch(rows, policy_version=version, device=_CPU)
        scores = score_tokens(model, batch, temperature=temperature)
        differences = (scores.logprobs - batch.behaviour_logprobs)[batch.lags == 0].abs()
        worst = max(worst, float(differences.max()))
    return worst


def weight_difference(learner: Learner, evidence: Evidence) -> float:
    """The largest between the learner's weights and those that the run published last."""
    folder = last_weights(evidence)
    if folder is None:
        return float("inf")
    published = safetensors.torch.load_file(folder / "model.safetensors")
    replayed = dict(learner.weights())
    if published.keys() != replayed.keys():
        return float("inf")
    return max(float((published[name] - tensor.detach()).abs().max()) for name, tensor in replayed.items())


def damage_checks(run_dir: Path, scratch: Path) -> list[dict[str, Any]]:
    """Damages each file of a copy of the run's newest checkpoint in each way, and looks at what is gone on from."""
    older, newest = sorted(path for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())[-2:]
    names = [str(path.relative_to(newest)) for path in sorted(newest.rglob("*")) if path.is_file()]
    wrong = num = 0
    for name in names:
        for damage in DAMAGES:
            shutil.rmtree(scratch, ignore_errors=True)
            for checkpoint in (older, newest):
                shutil.copytree(checkpoint, scratch / checkpoint.name)
            damage(scratch / newest.name / name)
            said: list[str] = []
            found = newest_complete(scratch, say=said.append)
            wrong += found != scratch / older.name or len(said) != 1 or "\n" in said[0] or newest.name not in said[0]
            num += 1
    return [budget(f"of {num} ways to damage the newest checkpoint, not said and passed over", wrong)]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _make_unreadable(path: Path) -> None:
    """Reading it fails as that of a broken disk does, also for root."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGES: Sequence[Callable[[Path], object]] = (
    _truncate,
    _flip,
    Path.unlink,
    lambda path: path.write_bytes(b""),
    _replace_by_folder,
    _make_unreadable,
)
