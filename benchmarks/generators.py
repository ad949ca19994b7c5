"""The embedded server beside transformers' own loops: tokens per second, over HTTP, on one thread each.

Compared are, turn about in one run so that other load on the machine hits all alike: the embedded server (a process of
its own, asked over HTTP, log-probs included), `model.generate` on the same batch, and transformers' continuous
batching (`generate_batch`, log-probs included). Each figure is the median over the rounds; each ratio is the median of
the rounds' own ratios.

- equal: 16 requests of equal length.
- heavy tail: more requests, 16 at a time; most answers are short and a few are long. `generate` runs a batch until its
  longest answer has ended.
- slices: the 16 equal requests in slices of 64 tokens (16 with --quick), and whole.
- turn: the second turn of a session, whose first lies in the KV cache, and one whose does not.

    python benchmarks/generators.py [--quick] [--json PATH]
"""

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from driftgym.agents.generators.launch import GeneratorConfig, start_embedded
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


QUICK = Plan(rounds=3, equal_tokens=32, chunk_tokens=16, tail_rounds=1, num_tailed=32, longest=160)
FULL = Plan(rounds=5, equal_tokens=192, chunk_tokens=64, tail_rounds=2, num_tailed=48, longest=384)


class Rivals:
    """One model, behind the embedded server and in this process."""

    def __init__(self, model: Any, client: SGLangGenerator) -> None:
        self._model = model
        self._client = client
        self._num_asked = 0

    async def embedded(self, work: Work, *, chunk_tokens: int | None = None) -> float:
        """Seconds that the server takes; at most 16 requests are with it at a time."""
        started = time.perf_counter()
        places = asyncio.Semaphore(BATCH)

        async def ask(prompt: Sequence[int], length: int) -> None:
            async with places:
                await self._ask(list(prompt), length, chunk_tokens=chunk_tokens or length)

        await asyncio.gather(*map(ask, work.prompts, work.lengths))
        return time.perf_counter() - started

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

    async def generate(self, work: Work) -> float:
        """Seconds that `model.generate` takes, 16 requests a batch."""
        started = time.perf_counter()
        for first in range(0, len(work.prompts), BATCH):
            ids = torch.tensor(work.prompts[first : first + BATCH])
            longest = max(work.lengths[first : first + BATCH])
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_sampling(max_new_tokens=longest, min_new_tokens=longest),
            )
        return time.perf_counter() - started

    async def continuous(self, work: Work) -> float:
        """Seconds that transformers' continuous batching takes for requests of one length."""
        started = time.perf_counter()
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
        elapsed_s = time.perf_counter() - started
        if sum(len(answer.generated_tokens) for answer in answers.values()) != work.num_tokens:
            raise SystemExit("transformers' continuous batching lost tokens")
        return elapsed_s


def _sampling(**options: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, **options)


def random_prompts(count: int, *, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    prompts: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (count, num_tokens)).tolist()
    return prompts


def tailed_lengths(count: int, *, longest: int) -> list[int]:
    """Pareto lengths of index 1.1 from 16 tokens on, cut at `longest`: half of them end before 31."""
    shares = (np.random.default_rng(0).permutation(count) + 0.5) / count
    return [int(min(longest, 16 * share ** (-1 / 1.1))) for share in shares]


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
        client = await start_embedded(
            Path(folder),
            GeneratorConfig(max_batch_size=BATCH, max_context_tokens=MAX_CONTEXT_TOKENS),
            incarnation=1,
            policy_version=0,
            timeout_s=300.0,
            close_timeout_s=10.0,
        )
        async with client:
            rivals = Rivals(model, client)
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

    async def in_slices(one: Work) -> float:
        return await rivals.embedded(one, chunk_tokens=plan.chunk_tokens)

    runs = {
        "embedded": rivals.embedded,
        "generate": rivals.generate,
        "slices": in_slices,
        "continuous": rivals.continuous,
    }
    seconds = await turn_about(runs, work, rounds=plan.rounds)
    num_tokens = work(0).num_tokens
    return {
        **{f"equal_{name}_tokens_per_s": num_tokens / statistics.median(taken) for name, taken in seconds.items()},
        "equal_embedded_to_generate": ratio(seconds["generate"], seconds["embedded"]),
        "equal_continuous_to_generate": ratio(seconds["generate"], seconds["continuous"]),
        "slices_to_whole": ratio(seconds["embedded"], seconds["slices"]),
    }


async def _tailed(rivals: Rivals, plan: Plan, *, vocab_size: int) -> dict[str, float]:
    lengths = tailed_lengths(plan.num_tailed, longest=plan.longest)

    def work(seed: int) -> Work:
        prompts = random_prompts(len(lengths), num_tokens=PROMPT_TOKENS, vocab_size=vocab_size, seed=seed)
        return Work(prompts=prompts, lengths=lengths)

    runs = {"embedded": rivals.embedded, "generate": rivals.generate}
    seconds = await turn_about(runs, work, rounds=plan.tail_rounds, warms_up=False)
    return {
        **{f"tail_{name}_tokens_per_s": sum(lengths) / statistics.median(taken) for name, taken in seconds.items()},
        "tail_embedded_to_generate": ratio(seconds["generate"], seconds["embedded"]),
    }


async def _turns(rivals: Rivals, plan: Plan, *, vocab_size: int) -> dict[str, float]:
    """A prompt of 768 tokens whose first 736 were read in the turn before, and one that is new."""

    def work(seed: int) -> Work:
        return Work(prompts=random_prompts(1, num_tokens=768, vocab_size=vocab_size, seed=seed), lengths=[8])

    async def second_turn(one: Work) -> float:
        await rivals.embedded(Work(prompts=[one.prompts[0][:736]], lengths=[1]))
        return await rivals.embedded(one)

    async def new_session(one: Work) -> float:
        return await rivals.embedded(Work(prompts=[one.prompts[0][::-1]], lengths=one.lengths))

    seconds = await turn_about({"reused": second_turn, "anew": new_session}, work, rounds=2 * plan.rounds)
    return {
        **{f"turn_{name}_ms": 1000 * statistics.median(taken) for name, taken in seconds.items()},
        "turn_anew_to_reused": ratio(seconds["anew"], seconds["reused"]),
    }


async def turn_about(
    runs: Mapping[str, Callable[[Work], Any]], work: Callable[[int], Work], *, rounds: int, warms_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each of `rounds` rounds; each run of each has prompts of its own. One round before may warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1 if warms_up else 0, rounds):
        for place, (name, run) in enumerate(runs.items()):
            taken = await run(work(100 * (number + 1) + place))
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' own ratios."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


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
    figures = {}
    for model, shape in (("small", SMALL), ("tiny", TINY)):
        figures[model] = asyncio.run(measure(shape, plan=plan))
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
