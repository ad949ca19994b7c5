"""Models of several families: loaded, scored as a plain forward scores them, or refused."""

import json

import pytest
import torch
from tiny_models import SMALL_SHAPE

from driftgym.errors import ConfigError
from driftgym.trainer.last_layer import hidden_states_at, prune_last_layer
from driftgym.trainer.model_loading import load_model, named_weights
from driftgym.trainer.models import ModelConfig

_FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **SMALL_SHAPE},
    "qwen2": {"model_type": "qwen2", **SMALL_SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL_SHAPE},
    "mistral": {"model_type": "mistral", **SMALL_SHAPE},
    "olmo2": {"model_type": "olmo2", **SMALL_SHAPE},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
_PRUNED = {"qwen3", "qwen2", "llama", "mistral"}


def _loaded(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_model(ModelConfig(path="m", init="random"), tmp_path, seed=1, device=torch.device("cpu"))


@pytest.mark.parametrize("family", _FAMILIES)
def test_hidden_states_are_those_of_a_plain_forward(tmp_path, family):
    model = _loaded(tmp_path, _FAMILIES[family]).eval()
    token_ids = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 10, 12, 32])
    plain = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
    assert plain.shape == (3, 11, 32)
    hidden = hidden_states_at(model, token_ids, positions)
    torch.testing.assert_close(hidden, plain.flatten(0, 1)[positions], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_last_layer_of_another_build_is_left_whole(tmp_path, family):
    assert prune_last_layer(_loaded(tmp_path, _FAMILIES[family])) == (family in _PRUNED)


@pytest.mark.parametrize("family", _FAMILIES)
def test_published_names_are_those_that_transformers_knows(tmp_path, family):
    model = _loaded(tmp_path, _FAMILIES[family])
    names = [name for name, _ in named_weights(model)]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(names) == set(model.state_dict()) - tied
    assert len(names) == len(set(names))


def test_capped_logits_are_refused(tmp_path):
    config = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0, **SMALL_SHAPE}
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        _loaded(tmp_path, config)


def test_weights_that_are_not_there_are_the_users_error(tiny_model_folder):
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(ModelConfig(path="m"), tiny_model_folder, seed=1, device=torch.device("cpu"))
