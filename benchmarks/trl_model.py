"""The model of `trl_side_by_side.py`: the quickstart's Qwen3 of 0.46 M parameters, with TRL's own Qwen3 chat template.

The template is read from the installed TRL, to the letter: TRL reads calls of templates that it ships alone. It writes
a system message of 1,300 characters, which would be most of what so small a model computes; so each constant stretch of
it is one token of the tokenizer. What the model writes is in ordinary tokens. A warm-up on the environment's oracle
teaches the form of a call; the oracle takes the right tool in 15 % of the cases.
"""

import argparse
import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from make_tiny_tokenizer import SPECIAL_TOKENS, make_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer
from trl_env import ENV_ID, TrlLookupEnv, tool_schemas

from driftgym.agents.chat import openai_tool
from driftgym.agents.demonstrations import demonstrate
from driftgym.agents.rendering import make_renderer
from driftgym.agents.rollout import RolloutConfig
from driftgym.config import Limits
from driftgym.envs.lookup.scripted import ScriptedLookupProvider
from driftgym.envs.slots import EnvSlots
from driftgym.envs.tasks import SeededTasks
from driftgym.trainer.learner import Learner
from driftgym.trainer.segments import segments_of
from driftgym.trainer.training_client import LearnerConfig, LearnerSpec, ModelConfig, WarmupConfig
from driftgym.types import Trajectory

CONFIG = Path(__file__).parents[1] / "configs" / "models" / "tiny-qwen3" / "config.json"
TEMPLATE = "qwen3_instruct_2507.jinja"
SKILL = 0.15
NUM_DEMONSTRATIONS = 2000
DEMONSTRATION_SEED = 1 << 20
NUM_SLOTS = 64
_SHORTEST_STRETCH = 8  # characters
_NAME, _TEXT = "NAME", "TEXT"


def template_text() -> str:
    """The chat template, from the installed TRL. Raises ModuleNotFoundError without one."""
    spec = importlib.util.find_spec("trl")  # found, not imported: that takes seconds
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("trl is not installed here: pip install -e '.[train,bench]'", name="trl")
    return (Path(spec.origin).parent / "chat_templates" / TEMPLATE).read_text(encoding="utf-8")


def make_model(folder: Path) -> None:
    """Config, tokenizer and chat template, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template_text(), encoding="utf-8")
    stretches = constant_stretches(folder)
    tokenizer.add_tokens([AddedToken(stretch, special=False, normalized=False) for stretch in stretches])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads(CONFIG.read_text(encoding="utf-8")) | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def constant_stretches(folder: Path) -> list[str]:
    """What the template writes around special tokens, the tools' names, the question and a tool's result."""
    tools = tool_schemas()
    call = {"type": "function", "function": {"name": _NAME, "arguments": {}}}
    messages = [
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _TEXT, "name": _NAME},
    ]
    text: str = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, tools=[openai_tool(tool) for tool in tools], tokenize=False
    )
    before, _, after = text.partition("<|im_start|>assistant")
    result = after.rpartition("<|im_start|>")[2]
    words = (*SPECIAL_TOKENS, *(tool.name for tool in tools), _TEXT)
    parts = re.split("|".join(map(re.escape, words)), before + result)
    found = dict.fromkeys(part for part in parts if len(part) >= _SHORTEST_STRETCH)
    return sorted(found, key=len, reverse=True)


def make_base(folder: Path, *, num_steps: int, seed: int = 0) -> Path:
    """The folder of the weights that both sides begin with, under `folder`. Takes about a minute for 300 steps."""
    torch.set_num_threads(1)
    make_model(folder / "model")
    spec = LearnerSpec(
        model=ModelConfig(path=str(folder / "model"), init="random"),
        model_folder=folder / "model",
        config=LearnerConfig.model_validate({"micro_batch_tokens": 16384, "num_threads": 1}),
        warmup=WarmupConfig(num_steps=num_steps, batch_size=32),
        seed=seed,
        temperature=1.0,
        incarnation=1,
    )
    learner = Learner(spec)
    rows = [
        s for each in asyncio.run(_demonstrations(folder / "model", seed)) for s in segments_of(each, advantage=0.0)
    ]
    learner.warm_up(rows)
    return Path(learner.publish(folder / "weights", is_last=True).location)


async def _demonstrations(folder: Path, seed: int) -> Sequence[Trajectory]:
    provider = ScriptedLookupProvider()
    slots = EnvSlots(lambda: TrlLookupEnv(sandboxes=provider, latency="instant"), num_slots=NUM_SLOTS)
    try:
        return await demonstrate(
            slots=slots,
            renderer=make_renderer("template", folder),
            tasks=SeededTasks(env_id=ENV_ID, seed=seed + DEMONSTRATION_SEED),
            num_episodes=NUM_DEMONSTRATIONS,
            skill=SKILL,
            seed=seed,
            limits=Limits(),
            config=RolloutConfig(max_turns=4),
        )
    finally:
        await slots.close()


def main() -> int:
    """Makes the model, and prints the folder of its weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it goes")
    parser.add_argument("--steps", type=int, default=300, help="of the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    given = parser.parse_args()
    print(make_base(given.folder, num_steps=given.steps, seed=given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
