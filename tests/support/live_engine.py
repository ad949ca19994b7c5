"""Asking a generator that is a real engine."""

import asyncio
import time
from pathlib import Path

import numpy as np
from tiny_models import VOCAB_SIZE

from driftgym.agents.generators.base import Generator
from driftgym.types import Completion, SamplingParams, WeightUpdate

INCARNATION = 3


def weights(models: list[Path], version: int, **options) -> WeightUpdate:
    """An update of the life 3; the place in `models` is the version."""
    location = options.pop("location", str(models[version]))
    return WeightUpdate(
        policy_version=version, incarnation=INCARNATION, location=location, checksum="sha256:0", **options
    )


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Random ones of 3 to 29 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in rng.integers(3, 30, count)]


async def ask(
    generator: Generator,
    prompt: list[int],
    *,
    request_id: str,
    max_tokens: int = 40,
    temperature: float = 1.0,
    timeout_s: float = 300.0,
    **options,
) -> Completion:
    """One completion; `options` are of the sampling."""
    return await generator.generate(
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=temperature, **options),
        request_id=request_id,
        session_id=request_id,
        deadline_s=time.monotonic() + timeout_s,
    )


def ask_all(generator: Generator, asked: list[list[int]], *, name: str, **options) -> list[asyncio.Task[Completion]]:
    """Completions under way, one for each prompt."""
    return [
        asyncio.create_task(ask(generator, prompt, request_id=f"{name}{index}", **options))
        for index, prompt in enumerate(asked)
    ]


async def until_running(generator: Generator, count: int) -> None:
    """Waits until so many are being decoded."""
    async with asyncio.timeout(60):
        while (await generator.load()).num_running < count:  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.02)
