"""TRL's side of `trl_side_by_side.py`, in a process of its own and in TRL's interpreter: trains, writes its figures.

`GRPOTrainer(environment_factory=...)` as it stands, without vLLM. What it does is watched from outside: `generate` is
wrapped, and a callback sees the end of each step.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl_settings as settings
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_env import ENV_ID, TOOL_NAMES, LookupTools, grade, tool_schemas

from driftgym.agents.rendering import make_renderer
from driftgym.envs.tasks import SeededTasks
from driftgym.types import Message


class Watch(TrainerCallback):
    """What happened when."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.started = time.monotonic()
        self.generating_s = 0.0
        self.rewards: list[float] = []
        self.points: list[settings.Point] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Notes the step."""
        latest = self.rewards[-settings.GROUPS_PER_STEP * settings.GROUP_SIZE :]
        self.points.append((time.monotonic() - self.started, sum(latest) / len(latest)))

    @property
    def episodes_per_s(self) -> float:
        """Of the steps after the first, in which torch and transformers load what they load late; of one, its own."""
        first_s = self.points[0][0] if len(self.points) > 1 else 0.0
        num_steps = max(1, len(self.points) - 1)
        return num_steps * settings.GROUPS_PER_STEP * settings.GROUP_SIZE / (self.points[-1][0] - first_s)

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, whose time is added up."""

        @functools.wraps(generate)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating_s += time.monotonic() - started

        return call

    def reward(
        self, completions: Sequence[Sequence[Mapping[str, Any]]], environments: Sequence[LookupTools], **_: Any
    ) -> list[float]:
        """Grades each episode."""
        rewards = [grade(env, messages) for env, messages in zip(environments, completions, strict=True)]
        self.rewards += rewards
        return rewards


def training_data(*, num_steps: int, seed: int) -> Dataset:
    """A row a task, in the order in which driftgym plays them."""
    tasks = SeededTasks(env_id=ENV_ID, seed=seed)
    num_tasks = num_steps * settings.GROUPS_PER_STEP
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": ""}]] * num_tasks,
            "seed": [tasks.task(index).seed for index in range(num_tasks)],
        }
    )


def grpo_config(folder: Path, *, num_steps: int, seed: int, is_continuous: bool) -> GRPOConfig:
    """One step takes all that is generated at once: nothing is scored twice, and `generate` has large batches."""
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=settings.GROUPS_PER_STEP * settings.GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=settings.GROUP_SIZE,
        max_completion_length=settings.MAX_EPISODE_TOKENS,
        generation_kwargs={"max_new_tokens": settings.MAX_TOKENS_PER_TURN},
        max_tool_calling_iterations=settings.MAX_TURNS - 1,
        learning_rate=settings.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=settings.BETAS[0],
        adam_beta2=settings.BETAS[1],
        epsilon_high=0.28,
        shuffle_dataset=False,
        use_vllm=False,
        use_transformers_continuous_batching=is_continuous,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def check_prompt(base: Path, tokenizer: Any) -> None:
    """Raises RuntimeError where TRL's model would read another prompt than driftgym's."""
    environment = LookupTools("instant")
    question = environment.reset(seed=0)
    methods = [getattr(environment, name) for name in sorted(TOOL_NAMES)]
    here = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tools=methods, add_generation_prompt=True, return_dict=False
    )
    renderer = make_renderer("template", base)
    there = renderer.first_prompt([Message(role="user", content=question)], tool_schemas())
    if here != there:
        raise RuntimeError(f"the prompts differ: {here} and {there}")


def train(base: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Trains `given.steps` steps from the weights in `base`."""
    torch.set_num_threads(given.threads)
    watch = Watch()
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    check_prompt(base, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    name = "generate_batch" if given.continuous else "generate"
    setattr(model, name, watch.timed(getattr(model, name)))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=watch.reward,
            args=grpo_config(Path(scratch), num_steps=given.steps, seed=given.seed, is_continuous=given.continuous),
            train_dataset=training_data(num_steps=given.steps, seed=given.seed),
            processing_class=tokenizer,
            callbacks=[watch],
            environment_factory=functools.partial(LookupTools, given.latency),
        )
        watch.started = time.monotonic()
        trainer.train()
        wall_s = time.monotonic() - watch.started
    return {
        "num_episodes": len(watch.rewards),
        "wall_s": wall_s,
        "episodes_per_s": watch.episodes_per_s,
        "generator_idle_fraction": 1.0 - watch.generating_s / wall_s,
        "points": watch.points,
    }


def main() -> int:
    """Trains and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the weights to begin with")
    parser.add_argument("--latency", required=True, help="of the tools, see slow_lookup.py")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    parser.add_argument("--out", type=Path, required=True, help="where the figures go")
    given = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    given.out.write_text(json.dumps(train(given.base, given)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
