"""Between messages and token ids: the contract of a renderer, and the choice of one by the model's own files."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from driftgym.agents.chat import openai_message, openai_tool
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError
from driftgym.types import Message, ToolCall

_LOG = logging.getLogger(__name__)
MARKER_KEY = "driftgym_renderer"
"""In `tokenizer_config.json`: the renderer that `auto` takes for this model."""

_QWEN35 = ("qwen3.5", "qwen3.6", "qwen3.8")
FAMILIES_BY_MODEL_TYPE: Mapping[str, Sequence[str]] = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_vl": ("qwen3-vl",),
    "qwen3_vl_moe": ("qwen3-vl",),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "llama": ("llama-3",),
    "gpt_oss": ("gpt-oss",),
    "gemma4": ("gemma4",),
    "gemma4_text": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "laguna": ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
}
"""Families of the library that a model of a `model_type` may belong to; which one, its chat template decides."""


class Renderer(Protocol):
    """Renders messages to token ids and reads completions, for one model family."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        ...

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """[P] the whole conversation, up to where the assistant's next tokens begin."""
        ...

    def next_prompt(
        self,
        *,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        conversation: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int] | None:
        """[N] the ids to append to `prompt_token_ids + completion_token_ids`, which stay as they are.

        They begin with what the template has after the assistant's text and the engine did not sample: the
        turn's end where the completion was cut, and the separator.

        Args:
            prompt_token_ids: the whole prompt of the turn before.
            completion_token_ids: what was sampled then, and what was put among it by force.
            conversation: all messages so far, the assistant's last one included.
            new_messages: what the assistant is to answer.
            tools: those of the first prompt.

        Returns:
            None when the template renders the turns so far in another way now: the conversation must then be
            rendered whole, and a new segment starts.
        """
        ...

    def parse(self, token_ids: Sequence[int], *, prompt_token_ids: Sequence[int], first_call_index: int) -> Message:
        """The message that a completion holds; never fails. Call ids count on from `first_call_index`."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """[N] the ids of `text`, on its own, for an assistant's turn; the names of special tokens become these."""
        ...

    def encode_action(self, conversation: Sequence[Message], action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """[L] the ids, turn's end included, that a model would sample to say `action` after `conversation`.

        Raises:
            ValueError: the template renders past actions in another way than they are sampled.
        """
        ...


def make_renderer(name: str, model_folder: Path) -> Renderer:
    """The renderer `name` for the model in `model_folder`.

    `auto` takes the one that `tokenizer_config.json` names; or the library's for the `model_type` in `config.json`,
    where it renders a probe exactly as the model's own chat template does; or the chat template itself.

    Args:
        name: `auto`, `compact`, `template`, or a family of the library `renderers`.
        model_folder: holds `config.json` and the tokenizer's files.

    Raises:
        ConfigError: a file is missing, the name is unknown, or the renderer does not fit the tokenizer.
    """
    folder = Path(model_folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such model folder")
    if name == "auto":
        name = str(_read_json(folder / "tokenizer_config.json").get(MARKER_KEY, "auto"))
    if name == "compact":
        from driftgym.agents.compact_renderer import CompactRenderer

        return CompactRenderer.from_folder(folder)
    model_type = str(_read_json(folder / "config.json").get("model_type", "")) if name == "auto" else ""
    try:
        return _make(name, folder, model_type=model_type)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _make(name: str, folder: Path, *, model_type: str) -> Renderer:
    from driftgym.agents.library_renderer import LibraryRenderer
    from driftgym.agents.template_renderer import TemplateRenderer

    tokenizer = _load_tokenizer(folder)
    if name == "template":
        return TemplateRenderer(tokenizer)
    if name != "auto":
        return LibraryRenderer(tokenizer, name)
    for candidate in FAMILIES_BY_MODEL_TYPE.get(model_type, ()):
        renderer = _fitting_library_renderer(tokenizer, candidate)
        if renderer is not None:
            _LOG.info("renderer: %s of the library, for model_type %s", candidate, model_type)
            return renderer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"no renderer for model_type {model_type!r}, and its tokenizer has no chat template; "
            "name one with agent.renderer"
        )
    _LOG.info("renderer: the model's own chat template")
    return TemplateRenderer(tokenizer)


def _fitting_library_renderer(tokenizer: Any, name: str) -> Renderer | None:
    """The library's renderer `name`, where it fits the tokenizer and agrees with its chat template."""
    from driftgym.agents.library_renderer import LibraryRenderer

    try:
        renderer = LibraryRenderer(tokenizer, name)
    except ConfigError:
        return None
    if getattr(tokenizer, "chat_template", None) and not _agrees_with_template(renderer, tokenizer):
        return None
    return renderer


def _agrees_with_template(renderer: Renderer, tokenizer: Any) -> bool:
    call = ToolCall(call_id="call_0", name="probe_tool", arguments={"key": "Zürich"})
    tool = ToolSchema(
        name="probe_tool",
        description="Probe.",
        parameters={"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    )
    messages = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="ping"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="41", tool_call_id="call_0", name="probe_tool"),
    )
    entries = [openai_message(message, escape=str) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            entries, tools=[openai_tool(tool)], tokenize=False, add_generation_prompt=True
        )
        expected = tokenizer.encode(text, add_special_tokens=False)
        return renderer.first_prompt(messages, [tool]) == list(expected)
    except Exception:  # a template's own refusal: jinja errors of many kinds
        return False


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for files that are missing or damaged
        first_line = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(f"its tokenizer cannot be loaded: {first_line[0]}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a model folder needs it") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold an object")
    return data
