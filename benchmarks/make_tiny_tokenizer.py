"""Makes the tokenizer of the tiny models anew: `python benchmarks/make_tiny_tokenizer.py [FOLDER]`.

A byte-level BPE trained on the texts of Lookup, so that any Unicode text goes in and comes out as it was, while the
environment's own words take a token each. Three rules serve a small model that has to copy: a digit is a token; a
word that begins with a capital, such as a name, is the same token after a space and after a quotation mark; an
identifier such as `get_age` is one piece. The same texts give the same files, byte for byte.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from driftgym.agents.chat import call_json, tool_signature
from driftgym.agents.rendering import MARKER_KEY
from driftgym.envs.lookup.store import NAMES, TOOLS, draw_world
from driftgym.types import ToolCall

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
VOCAB_SIZE = 512
NUM_WORLDS = 2000
PIECES = r"\p{Lu}[\p{L}\p{M}_]*| ?[\p{Ll}\p{Lo}\p{Lm}_][\p{L}\p{M}_]*|\p{N}|[^\s\p{L}\p{N}_]+|\s"
LIKELY_WORDS = (
    "The answer is not. error: unknown tool; known: missing argument unknown argument; timed out after s "
    "the call is not JSON arguments must be a JSON object, got a string "
    "[output cut: bytes more] yes no true false null"
)


def training_texts() -> Iterator[str]:
    """Questions, calls, signatures and results as the compact renderer writes them, and words of error messages."""
    for tools in TOOLS.values():
        signatures = " ".join(tool_signature(tool, with_types=False) for tool in tools)
        for _ in range(NUM_WORLDS // 4):
            yield signatures
            yield from (f"{role}\n" for role in ("system", "user", "assistant", "tool"))
    for seed in range(NUM_WORLDS):
        world = draw_world(seed=seed, level="two_calls" if seed % 2 else "one_call", num_people=8)
        yield world.question
        for needed in world.needed:
            yield call_json(ToolCall(call_id="call_0", name=needed.tool, arguments=needed.arguments), compact=True)
            yield needed.result
    rng = np.random.default_rng(0)
    for _ in range(NUM_WORLDS // 20):
        yield from (NAMES[index] for index in rng.permutation(len(NAMES)))
    for _ in range(NUM_WORLDS // 100):
        yield LIKELY_WORDS


def make_tokenizer() -> Tokenizer:
    """The tokenizer, trained."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def main() -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    default = Path(__file__).parents[1] / "configs" / "models" / "tiny-qwen3"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        MARKER_KEY: "compact",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
