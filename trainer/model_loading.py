"""Models as torch modules: loading, random weights, LoRA, and the tensors that are published."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from driftgym.errors import ConfigError
from driftgym.trainer.adapters import ADAPTER_NAME
from driftgym.trainer.last_layer import prune_last_layer
from driftgym.trainer.models import LoraConfig, ModelConfig
from driftgym.trainer.packed_attention import attend_by_kernel, attention_in_words, enable_packed_rows
from driftgym.trainer.precision import body_dtype, compute_body_in
from driftgym.trainer.varlen_attention import varlen_kernel

_CHECK_TOLERANCE = 1e-4


def load_model(config: ModelConfig, folder: Path, *, seed: int, device: torch.device) -> Any:
    """A causal language model of transformers, ready to be trained, in evaluation mode.

    Generators sample without dropout: a model that trained with it would score tokens as those of another policy.

    Raises:
        ConfigError: transformers cannot load it, or its logits are more than its head applied to its decoder's
            output, which is how log-probs are computed here, or it is not computed right in `config.dtype`.
    """
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(seed)
    try:
        model = _made_from(config, folder, torch.float32 if config.computes_with_copies else dtype)
    except Exception as error:
        raise ConfigError(f"model.path: {folder}: transformers cannot load it: {_first_line(error)}") from error
    _check_head(model, folder)
    if config.lora is not None:
        model = _with_adapters(model, config.lora, folder)
    prune_last_layer(model)
    enable_packed_rows(model)
    model = model.to(device).eval()
    if config.computes_with_copies:
        compute_body_in(model, dtype)
    kernel = varlen_kernel(device=device, dtype=body_dtype(model))
    if kernel is not None:
        attend_by_kernel(model, kernel)
    return model


def compute_in_words(model: Any) -> str:
    """What the model is computed in, for people to read."""
    dtypes = {"decoder": body_dtype(model), "weights that are trained": torch.float32}
    types = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
    return f"{types}; attention {attention_in_words(model)}"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name that transformers gives it, adapters merged in; tied weights once.

    Tensors of a full model are those that are trained, not copies: use them before the next step.
    """
    merged = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        plain_owner = owner.removesuffix(".base_layer")
        if "lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = tensor.detach()
        if plain_owner in merged and leaf == "weight":
            delta = cast(Any, merged[plain_owner]).get_delta_weight(ADAPTER_NAME)
            value = value + delta.to(value.dtype)
        yield f"{plain_owner}.{leaf}" if plain_owner else leaf, value


def _made_from(config: ModelConfig, folder: Path, dtype: torch.dtype) -> Any:
    if config.init == "pretrained":
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    architecture = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return transformers.AutoModelForCausalLM.from_config(architecture, dtype=dtype)


def _with_adapters(model: Any, config: LoraConfig, folder: Path) -> Any:
    try:
        import peft  # an extra, needed by LoRA alone
    except ImportError:
        raise ConfigError("model.lora: the package peft is not installed; run `pip install driftgym[lora]`") from None
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    try:
        model = peft.inject_adapter_in_model(lora, model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {folder}: {_first_line(error)}") from None
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def _check_head(model: Any, folder: Path) -> None:
    """Raises ConfigError when the model's logits are not its head applied to its decoder's output."""
    token_ids = torch.arange(min(4, model.config.vocab_size))[None]
    model.eval()
    expected = model(input_ids=token_ids, use_cache=False).logits
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is not None and head is not None:
        logits = head(decoder(input_ids=token_ids, use_cache=False).last_hidden_state)
        if logits.shape == expected.shape and torch.allclose(logits, expected, atol=_CHECK_TOLERANCE, rtol=1e-3):
            return
    raise ConfigError(
        f"model.path: {folder}: {type(model).__name__} scales or caps its logits, which the learner does not reproduce"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
