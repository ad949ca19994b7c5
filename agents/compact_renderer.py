"""The renderer of the tiny models: ChatML with as few tokens as will do.

A message is `<|im_start|>role\\n`, its text, `<|im_end|>`, with nothing between messages. The system message ends
with one line of tool signatures, a call is `<tool_call>{"name":...,"arguments":{...}}</tool_call>` and a tool's
result is its bare text. What a message renders to does not depend on its neighbours, so every turn can be bridged.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from driftgym.agents.chat import call_json, readable_calls, tool_signature
from driftgym.agents.parsing import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, read_message
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError
from driftgym.types import Message, Role

TURN_OPEN = "<|im_start|>"
TURN_CLOSE = "<|im_end|>"
_TAG = re.compile(
    f"({'|'.join(map(re.escape, (TURN_OPEN, TURN_CLOSE, CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE)))})"
)


class CompactRenderer:
    """Implements `driftgym.agents.rendering.Renderer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes over `tokenizer`: from here on it reads special tokens in a text as plain text."""
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        self._turn_open = self._special(TURN_OPEN)
        self._turn_close = self._special(TURN_CLOSE)
        self._call_open = self._special(CALL_OPEN)
        self._call_close = self._special(CALL_CLOSE)
        self._think_open = self._special(THINK_OPEN)
        self._think_close = self._special(THINK_CLOSE)
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
        self._headers = {role: [self._turn_open, *self._encode(f"{role}\n")] for role in roles}

    @classmethod
    def from_folder(cls, folder: Path) -> "CompactRenderer":
        """The renderer of the model in `folder`. Raises ConfigError when its tokenizer is missing or unfit."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: missing; the compact renderer needs it")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise ConfigError(f"{path}: not a tokenizer: {error}") from None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that ends a turn."""
        return (self._turn_close,)

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.first_prompt`."""
        ids: list[int] = []
        if tools:
            has_system = bool(messages) and messages[0].role == "system"
            signatures = " ".join(tool_signature(tool, with_types=False) for tool in tools)
            text = f"{messages[0].text}\n{signatures}" if has_system else signatures
            ids += [*self._headers["system"], *self._encode(text), self._turn_close]
            messages = messages[1:] if has_system else messages
        for message in messages:
            ids += self._message(message)
        return ids + self._headers["assistant"]

    def next_prompt(
        self,
        *,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        conversation: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int] | None:
        """See `Renderer.next_prompt`; never None."""
        ids: list[int] = []
        if not len(completion_token_ids) or completion_token_ids[-1] != self._turn_close:
            ids.append(self._turn_close)
        for message in new_messages:
            ids += self._message(message)
        return ids + self._headers["assistant"]

    def parse(self, token_ids: Sequence[int], *, prompt_token_ids: Sequence[int], first_call_index: int) -> Message:
        """See `Renderer.parse`."""
        ids = list(token_ids)
        if ids and ids[-1] == self._turn_close:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return read_message(text, reasoning_is_open=False, first_call_index=first_call_index)

    def encode_text(self, text: str) -> list[int]:
        """See `Renderer.encode_text`."""
        pieces = (piece for piece in _TAG.split(text) if piece)
        return [token_id for piece in pieces for token_id in self._tag_or_text(piece)]

    def encode_action(self, conversation: Sequence[Message], action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """See `Renderer.encode_action`."""
        return [*self._action(action), self._turn_close]

    def _message(self, message: Message) -> list[int]:
        body = self._action(message) if message.role == "assistant" else self._encode(message.text)
        return [*self._headers[message.role], *body, self._turn_close]

    def _action(self, message: Message) -> list[int]:
        ids: list[int] = []
        if message.reasoning:
            ids += [self._think_open, *self._encode(message.reasoning), self._think_close]
        ids += self._encode(message.text)
        for call in readable_calls(message):
            ids += [self._call_open, *self._encode(call_json(call, compact=True)), self._call_close]
        return ids

    def _tag_or_text(self, piece: str) -> list[int]:
        return [self._special(piece)] if _TAG.fullmatch(piece) else self._encode(piece)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _special(self, token: str) -> int:
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigError(f"the tokenizer has no token {token}, which the compact renderer needs")
        return token_id
