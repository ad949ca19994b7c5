"""Training rows padded, packed, and packed with what they share read once: tokens per second, on one CPU core.

Each step plans micro-batches, makes their tensors, and goes forward and backward; the optimizer is left out. A token
counts as often as it stands in a row, however often it is read, so that the figures of one shape can be compared. The
ways go turn about in one run; each ratio is the median of the rounds' own ratios of CPU time, which other load on the
machine changes least.

- quickstart: 4 groups of 8, a prompt of 27 tokens for each group and 32 to 38 after it, on the quickstart's model.
- tail: 24 rows that share nothing, of Pareto lengths of 64 to 1024 tokens.
- long prompt: 2 groups of 8, a prompt of 512 tokens and short answers.
- equal: 32 rows of one length that share nothing: there is nothing to gain.

`packed` are the same shapes, with nothing in common: what packing gives without sharing. Where it would give less than
`packing.pays` asks for, rows are padded, and the ratio is 1.

    python benchmarks/packing.py [--quick] [--json PATH]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from driftgym.trainer.batching import Row, micro_batch, plan_micro_batches, score_tokens
from driftgym.trainer.model_loading import load_model, trained_parameters
from driftgym.trainer.models import ModelConfig
from driftgym.types import Segment

MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny-qwen3"
VOCAB_SIZE = 512
TRAINED_SHARE = 2 / 3  # of what comes after the prompt; the rest is what tools said
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows: so many groups of so many members, and their lengths."""

    groups: int
    members: int
    num_prompt: int
    answer_lengths: Callable[[np.random.Generator], int]
    micro_batch_tokens: int = 16384

    def rows(self, *, is_shared: bool) -> list[Row]:
        """The rows, the same at every call. When not `is_shared`, each member has a prompt of its own."""
        rng = np.random.default_rng(0)
        rows = []
        for group in range(self.groups):
            prompt = rng.integers(3, VOCAB_SIZE, self.num_prompt)
            for member in range(self.members):
                answer = rng.integers(3, VOCAB_SIZE, self.answer_lengths(rng))
                own = prompt if is_shared else rng.permutation(prompt)
                rows.append(_row(np.concatenate([own, answer]), num_prompt=len(own), name=(group, member)))
        return rows


def _row(token_ids: np.ndarray[Any, Any], *, num_prompt: int, name: tuple[int, int]) -> Row:
    answer = len(token_ids) - num_prompt
    trained = np.zeros(len(token_ids), dtype=np.bool_)
    trained[max(1, num_prompt) : num_prompt + round(TRAINED_SHARE * answer)] = True
    trained[-1] = True
    segment = Segment(
        trajectory_id=f"{name[0]}-{name[1]}",
        group_id=str(name[0]),
        segment_index=0,
        token_ids=token_ids,
        loss_mask=trained,
        behaviour_logprobs=np.where(trained, -6.0, 0.0),
        policy_versions=np.where(trained, 0, -1),
        advantages=np.where(trained, (-1.0) ** name[1], 0.0),
    )
    return Row(segment=segment, token_weight=1e-3)


SHAPES = {
    "quickstart": Shape(groups=4, members=8, num_prompt=27, answer_lengths=lambda rng: int(rng.integers(32, 39))),
    "tail": Shape(
        groups=24,
        members=1,
        num_prompt=0,
        answer_lengths=lambda rng: int(min(1024, 64 * (1 + rng.pareto(1.1)))),
        micro_batch_tokens=8192,
    ),
    "long_prompt": Shape(groups=2, members=8, num_prompt=512, answer_lengths=lambda rng: int(rng.integers(16, 48))),
    "equal": Shape(groups=32, members=1, num_prompt=0, answer_lengths=lambda rng: 62),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step took and gave."""

    cpu_s: float
    num_read: int
    gradient: torch.Tensor


def step(model: Any, rows: Sequence[Row], *, max_tokens: int, packs: bool) -> Step:
    """One pass over `rows`, forward and backward."""
    model.zero_grad()
    started = time.process_time()
    num_read = 0
    for part in plan_micro_batches(rows, max_tokens=max_tokens, packs=packs):
        batch = micro_batch(part, policy_version=1, device=CPU, packs=packs)
        scores = score_tokens(model, batch, temperature=1.0)
        (scores.logprobs * batch.weights.float() * batch.advantages).sum().backward()
        num_read += batch.num_inputs
    cpu_s = time.process_time() - started
    gradient = torch.cat([parameter.grad.flatten() for parameter in trained_parameters(model).values()])
    return Step(cpu_s=cpu_s, num_read=num_read, gradient=gradient)


def measure(model: Any, shape: Shape, *, rounds: int) -> dict[str, float]:
    """The figures of one shape."""
    shared, alone = shape.rows(is_shared=True), shape.rows(is_shared=False)
    ways = {"padded": (shared, False), "packed": (alone, True), "packed_shared": (shared, True)}
    taken: dict[str, list[Step]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (rows, packs) in ways.items():
            one = step(model, rows, max_tokens=shape.micro_batch_tokens, packs=packs)
            if number:  # the first warms up
                taken[name].append(one)
    gap = taken["padded"][0].gradient - taken["packed_shared"][0].gradient
    num_tokens = sum(row.num_inputs for row in shared)
    return {
        "num_tokens": float(num_tokens),
        **{f"{name}_tokens_read": float(steps[0].num_read) for name, steps in taken.items()},
        **{f"{name}_tokens_per_s": num_tokens / _median_cpu_s(steps) for name, steps in taken.items()},
        "packed_to_padded": _ratio(taken, "packed"),
        "packed_shared_to_padded": _ratio(taken, "packed_shared"),
        "gradient_max": float(taken["padded"][0].gradient.abs().max()),
        "gradient_difference_max": float(gap.abs().max()),
    }


def _median_cpu_s(steps: Sequence[Step]) -> float:
    return statistics.median(each.cpu_s for each in steps)


def _ratio(taken: Mapping[str, Sequence[Step]], name: str) -> float:
    pairs = zip(taken["padded"], taken[name], strict=True)
    return statistics.median(padded.cpu_s / other.cpu_s for padded, other in pairs)


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # as the learner by default
    model = load_model(ModelConfig(path=str(MODEL), init="random"), MODEL, seed=0, device=CPU)
    figures = {}
    for name, shape in SHAPES.items():
        figures[name] = measure(model, shape, rounds=7 if arguments.quick else 25)
        for figure, value in figures[name].items():
            print(f"{name}.{figure}: {value:.4g}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "budgets": []}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
