"""The embedded server beside transformers' own loops: tokens per second, over HTTP, on one thread each.

Compared are, turn about in one run so that other load on the machine hits all alike: the embedded server (a process of
its own, asked over HTTP, log-probs included), `model.generate` on the same batch, and transformers' continuous
batching (`generate_batch`, log-probs included). Each figure is the median over the rounds; each ratio is the median of
the rounds' own ratios. Beside the ratio of wall times stands that of CPU times, server and client added up, which other
load on the machine changes less; budgets are held against wall times.

- equal: 16 requests of equal length.
- heavy tail: more requests, 16 at a time; most answers are short and a few are long. `generate` runs a batch until its
  longest answer has ended.
- slices: the 16 equal requests in slices of 64 tokens (16 with --quick), and whole.
- turn: the second turn of a session, whose first lies in the KV cache, and one whose does not.

    python benchmarks/generators.py [--quick] [--json PATH]
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from driftgym.agents.generators.launch import EmbeddedServer, GeneratorConfig
from driftgym.agents.generators.sglang import SGLangGenerator
from driftgym.types import SamplingParams

BATCH = 16
PROMPT_TOKENS = 64
PAGE_TOKENS = 32
MAX_CONTEXT_TOKENS = 1024
SHARE_OF_GENERATE = 0.9
TIMES_GENERATE_ON_TAIL = 2.0
TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
# A fifth of SmolLM2-135M: 28 million parameters.
SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "vocab_size": 32768,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Requests: a prompt each, and how many tokens are wanted."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    equal_tokens: int
    chunk_tokens: int
    tail_rounds: int
    num_tailed: int
    longest: int


TINY_TIMES = 4  # as many tokens: a run is to take long beside the cost of a request
QUICK = Plan(rounds=3, equal_tokens=32, chunk_tokens=16, tail_rounds=1, num_tailed=32, longest=256)
FULL = Plan(rounds=4, equal_tokens=128, chunk_tokens=64, tail_rounds=2, num_tailed=64, longest=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run took."""

    wall_s: float
    cpu_s: float


class Rivals:
    """One model, behind the embedded server and in this process."""

    def __init__(self, model: Any, server: EmbeddedServer, client: SGLangGenerator) -> None:
        self._model = model
        self._server = server
        self._client = client
        self._num_asked = 0

    def clocks(self) -> Spent:
        """Wall time, and the CPU time of this process and the server's."""
        fields = Path(f"/proc/{self._server.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        server_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Spent(wall_s=time.perf_counter(), cpu_s=time.process_time() + server_s)

    async def embedded(self, work: Work, *, chunk_tokens: int | None = None) -> None:
        """By the server, over HTTP; at most 16 requests are with it at a time."""
        places = asyncio.Semaphore(BATCH)

        async def ask(prompt: Sequence[int], length: int) -> None:
            async with places:
                await self._ask(list(prompt), length, chunk_tokens=chunk_tokens or length)

        await asyncio.gather(*map(ask, work.prompts, work.lengths))

    async def _ask(self, prompt: list[int], length: int, *, chunk_tokens: int) -> None:
        while length > 0:
            self._num_asked += 1
            name = str(self._num_asked)
            completion = await self._client.generate(
                prompt,
                SamplingParams(max_tokens=min(length, chunk_tokens)),
                request_id=name,
                session_id=name,
                deadline_s=time.monotonic() + 600.0,
            )
            prompt = [*prompt, *completion.token_ids.tolist()]
            length -= len(completion.token_ids)

    async def generate(self, work: Work) -> None:
        """By `model.generate`, 16 requests a batch."""
        for first in range(0, len(work.prompts), BATCH):
            ids = torch.tensor(work.prompts[first : first + BATCH])
            longest = max(work.lengths[first : first + BATCH])
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_sampling(max_new_tokens=longest, min_new_tokens=longest),
            )

    async def continuous(self, work: Work) -> None:
        """By transformers' continuous batching, for requests of one length."""
        answers = self._model.generate_batch(
            [list(prompt) for prompt in work.prompts],
            generation_config=_sampling(max_new_tokens=work.lengths[0], eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=BATCH * MAX_CONTEXT_TOKENS // PAGE_TOKENS,
                max_batch_tokens=BATCH * PROMPT_TOKENS,
                max_requests_per_batch=BATCH,
                return_logprobs=True,
            ),
            progress_bar=False,
        )
        if sum(len(answer.generated_tokens) for answer in answers.values()) != work.num_tokens:
            raise SystemExit("transformers' continuous batching lost tokens")


def _sampling(**options: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, **options)


def random_prompts(count: int, *, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    prompts: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (count, num_tokens)).tolist()
    return prompts


def tailed_lengths(count: int, *, longest: int) -> list[int]:
    """Pareto lengths of index 1.1 from 8 tokens on, cut at `longest`: half of them are at most 15."""
    shares = (np.random.default_rng(0).permutation(count) + 0.5) / count
    return [int(min(longest, 8 * share ** (-1 / 1.1))) for share in shares]


async def measure(shape: Mapping[str, int], *, plan: Plan) -> dict[str, float]:
    """The figures of a random model of `shape`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        server = await EmbeddedServer.start(
            Path(folder),
            GeneratorConfig(max_batch_size=BATCH, max_context_tokens=MAX_CONTEXT_TOKENS),
            incarnation=1,
            policy_version=0,
            timeout_s=300.0,
        )
        async with SGLangGenerator(server.url, incarnation=1, max_concurrency=BATCH, server=server) as client:
            rivals = Rivals(model, server, client)
            return {
                "num_parameters": float(model.num_parameters()),
                **await _equal(rivals, plan, vocab_size=config.vocab_size),
                **await _tailed(rivals, plan, vocab_size=config.vocab_size),
                **await _turns(rivals, plan, vocab_size=config.vocab_size),
            }


async def _equal(rivals: Rivals, plan: Plan, *, vocab_size: int) -> dict[str, float]:
    def work(seed: int) -> Work:
        prompts = random_prompts(BATCH, num_tokens=PROMPT_TOKENS, vocab_size=vocab_size, seed=seed)
        return Work(prompts=prompts, lengths=[plan.equal_tokens] * BATCH)

    async def in_slices(one: Work) -> None:
        await rivals.embedded(one, chunk_tokens=plan.chunk_tokens)

    runs = {
        "embedded": rivals.embedded,
        "generate": rivals.generate,
        "slices": in_slices,
        "continuous": rivals.continuous,
    }
    spent = await turn_about(rivals, runs, work, rounds=plan.rounds)
    return {
        **tokens_per_s("equal", spent, num_tokens=work(0).num_tokens),
        **ratios("equal_embedded_to_generate", spent["generate"], spent["embedded"]),
        **ratios("equal_continuous_to_generate", spent["generate"], spent["continuous"]),
        **ratios("equal_slices_to_whole", spent["embedded"], spent["slices"]),
    }


async def _tailed(rivals: Rivals, plan: Plan, *, vocab_size: int) -> dict[str, float]:
    lengths = tailed_lengths(plan.num_tailed, longest=plan.longest)

    def work(seed: int) -> Work:
        prompts = random_prompts(len(lengths), num_tokens=PROMPT_TOKENS, vocab_size=vocab_size, seed=seed)
        return Work(prompts=prompts, lengths=lengths)

    runs = {"embedded": rivals.embedded, "generate": rivals.generate}
    spent = await turn_about(rivals, runs, work, rounds=plan.tail_rounds, warms_up=False)
    return {
        **tokens_per_s("tail", spent, num_tokens=sum(lengths)),
        **ratios("tail_embedded_to_generate", spent["generate"], spent["embedded"]),
    }


async def _turns(rivals: Rivals, plan: Plan, *, vocab_size: int) -> dict[str, float]:
    """A prompt of 768 tokens whose first 736 were read in the turn before, and one that is new."""

    def work(seed: int) -> Work:
        return Work(prompts=random_prompts(1, num_tokens=768, vocab_size=vocab_size, seed=seed), lengths=[8])

    async def before(one: Work) -> None:
        await rivals.embedded(Work(prompts=[one.prompts[0][:736]], lengths=[1]))

    async def new_session(one: Work) -> None:
        await rivals.embedded(Work(prompts=[one.prompts[0][::-1]], lengths=one.lengths))

    runs = {"first": before, "reused": rivals.embedded, "anew": new_session}
    spent = await turn_about(rivals, runs, work, rounds=2 * plan.rounds, is_shared=True)
    return {
        **{f"turn_{name}_ms": 1000 * _median_wall_s(spent[name]) for name in ("reused", "anew")},
        **ratios("turn_anew_to_reused", spent["anew"], spent["reused"]),
    }


async def turn_about(
    rivals: Rivals,
    runs: Mapping[str, Callable[[Work], Awaitable[None]]],
    work: Callable[[int], Work],
    *,
    rounds: int,
    warms_up: bool = True,
    is_shared: bool = False,
) -> dict[str, list[Spent]]:
    """What each run took in each of `rounds` rounds. One round before may warm up.

    Each run has prompts of its own, or, when `is_shared`, all runs of a round have the same.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in runs}
    for number in range(-1 if warms_up else 0, rounds):
        for place, (name, run) in enumerate(runs.items()):
            one = work(100 * (number + 1) + (0 if is_shared else place))
            before = rivals.clocks()
            await run(one)
            after = rivals.clocks()
            if number >= 0:
                spent[name].append(Spent(wall_s=after.wall_s - before.wall_s, cpu_s=after.cpu_s - before.cpu_s))
    return spent


def tokens_per_s(name: str, spent: Mapping[str, Sequence[Spent]], *, num_tokens: int) -> dict[str, float]:
    """Of each run, by its median wall time."""
    return {f"{name}_{run}_tokens_per_s": num_tokens / _median_wall_s(taken) for run, taken in spent.items()}


def ratios(name: str, above: Sequence[Spent], below: Sequence[Spent]) -> dict[str, float]:
    """The medians of the rounds' own ratios, of wall and of CPU time."""
    pairs = list(zip(above, below, strict=True))
    return {
        name: statistics.median(one.wall_s / other.wall_s for one, other in pairs),
        f"{name}_cpu": statistics.median(one.cpu_s / max(other.cpu_s, 0.01) for one, other in pairs),
    }


def _median_wall_s(spent: Sequence[Spent]) -> float:
    return statistics.median(each.wall_s for each in spent)


def _budget(name: str, value: float, budget: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "budget": budget, "ok": value >= budget}


def main() -> None:
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter answers and fewer rounds")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # as the server
    plan = QUICK if arguments.quick else FULL
    longer = dataclasses.replace(
        plan, equal_tokens=TINY_TIMES * plan.equal_tokens, chunk_tokens=64, tail_rounds=3, num_tailed=192, longest=256
    )
    figures = {}
    for model, shape, its_plan in (("small", SMALL, plan), ("tiny", TINY, longer)):
        figures[model] = asyncio.run(measure(shape, plan=its_plan))
        for name, value in figures[model].items():
            print(f"{model}.{name}: {value:.4g}", flush=True)
    small = figures["small"]
    budgets = [
        _budget("generator_share_of_generate_equal", small["equal_embedded_to_generate"], SHARE_OF_GENERATE),
        _budget("generator_times_generate_tail", small["tail_embedded_to_generate"], TIMES_GENERATE_ON_TAIL),
    ]
    for each in budgets:
        print(f"{each['name']}: {each['value']} (budget {each['budget']}, {'ok' if each['ok'] else 'MISSED'})")
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "budgets": budgets}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
