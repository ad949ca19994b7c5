import json
from pathlib import Path
from typing import Any

import pytest

from driftgym.agents.compact_renderer import CompactRenderer
from driftgym.agents.library_renderer import LibraryRenderer, library_renderer_names
from driftgym.agents.rendering import FAMILIES_BY_MODEL_TYPE, make_renderer
from driftgym.agents.template_renderer import TemplateRenderer
from driftgym.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What Qwen3's template writes for a conversation with tools and without thinking.
QWEN3_TOOLS = (
    "<|im_start|>system\n{{ messages[0]['content'] }}\n\n# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    "{% for tool in tools or [] %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools>\n\n"
    "For each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% for m in messages[1:] %}"
    "{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "<tool_call>\n{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "{{ '\n' }}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(tokenizer: Any, folder: Path, *, template: str | None, model_type: str) -> Path:
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_the_tiny_model_names_its_renderer_itself(tiny_folder: Path) -> None:
    assert isinstance(make_renderer("auto", tiny_folder), CompactRenderer)


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (None, "qwen3", LibraryRenderer),
        (QWEN3_TOOLS, "qwen3", LibraryRenderer),
        (CHATML, "qwen3", TemplateRenderer),  # a fine-tune with a template of its own
        (CHATML, "llama", TemplateRenderer),
        (CHATML, "gpt_oss", TemplateRenderer),  # the library would fetch a file for it
        (CHATML, "qwen3_5", TemplateRenderer),
        (CHATML, "nemotron_h", TemplateRenderer),
        (CHATML, "never-heard-of", TemplateRenderer),
    ],
)
def test_auto_goes_by_the_model_s_own_files(
    qwen3_tokenizer: Any, tmp_path: Path, template: str | None, model_type: str, expected: type
) -> None:
    folder = save(qwen3_tokenizer, tmp_path, template=template, model_type=model_type)
    assert type(make_renderer("auto", folder)) is expected


def test_the_library_knows_every_family_that_a_model_type_may_belong_to() -> None:
    families = {name for names in FAMILIES_BY_MODEL_TYPE.values() for name in names}
    assert families <= set(library_renderer_names())


def test_a_renderer_can_be_named(qwen3_tokenizer: Any, tmp_path: Path) -> None:
    folder = save(qwen3_tokenizer, tmp_path, template=CHATML, model_type="qwen3")
    assert type(make_renderer("qwen3", folder)) is LibraryRenderer
    assert type(make_renderer("template", folder)) is TemplateRenderer


def test_nothing_fits_is_an_error_in_one_line(qwen3_tokenizer: Any, tmp_path: Path) -> None:
    folder = save(qwen3_tokenizer, tmp_path, template=None, model_type="never-heard-of")
    with pytest.raises(ConfigError, match=r"no renderer for model_type 'never-heard-of'.*agent\.renderer"):
        make_renderer("auto", folder)
    with pytest.raises(ConfigError, match="no chat template"):
        make_renderer("template", folder)
    with pytest.raises(ConfigError, match="unknown; auto, compact, template"):
        make_renderer("qwenn", folder)


def test_missing_and_damaged_files_are_named(qwen3_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        make_renderer("auto", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read"):
        make_renderer("auto", tmp_path)
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        make_renderer("template", tmp_path)
    save(qwen3_tokenizer, tmp_path, template=None, model_type="qwen3")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: must hold an object"):
        make_renderer("auto", tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        make_renderer("auto", tmp_path)
