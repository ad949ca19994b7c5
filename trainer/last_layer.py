"""The decoder's last layer, computed only where something is predicted.

What the last layer gives at a position is read only where the next token is trained: a quarter of the positions of a
tool-calling episode. Keys and values are wanted everywhere; what comes after attention (its output projection and the
feed-forward part) is not, and in a model of two layers leaving it out saves a fifth of a step. It holds for layers
built as those of Llama, Qwen and Mistral (attention, then a feed-forward part, each with a norm before it and a
residual around it); `prune_last_layer` tries it on the model at hand, and lets it be where the figures differ.

Legend: B rows (1 where they are packed), T tokens, H the model's width, N positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from driftgym.trainer.packed_attention import PackedRows
from driftgym.trainer.precision import decoder_output

_TOLERANCE = 1e-4


class _PrunedForward:
    """Stands in for the `forward` of a decoder's last layer: the same, unless positions are set."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._full_forward = layer.forward
        self._projection = layer.self_attn.o_proj
        self._full_projection = self._projection.forward
        self.positions: Tensor | None = None
        """[N] in the flat [B·T]; None computes all of [B, T, H]."""

    def put(self) -> None:
        """Takes its place."""
        self._layer.forward = self
        self._projection.forward = self._project

    def remove(self) -> None:
        """Leaves the layer as it was."""
        self._layer.forward = self._full_forward
        self._projection.forward = self._full_projection

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[B, T, H], or [1, N, H] where positions are set."""
        if self.positions is None:
            full: Tensor = self._full_forward(hidden_states, **kwargs)
            return full
        layer = self._layer
        attended_1NH, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        chosen_1NH = hidden_states.flatten(0, 1).index_select(0, self.positions) + attended_1NH
        return chosen_1NH + layer.mlp(layer.post_attention_layernorm(chosen_1NH))

    def _project(self, attended: Tensor) -> Tensor:
        """[B, T, H], or [1, N, H] where positions are set."""
        if self.positions is not None:
            attended = attended.flatten(0, 1).index_select(0, self.positions)[None]
        return self._full_projection(attended)


def hidden_states_at(
    model: nn.Module, token_ids: Tensor, positions: Tensor, *, packed_rows: PackedRows | None = None
) -> Tensor:
    """[N, H]: the decoder's output for [B, T] `token_ids` at [N] `positions` of the flat [B·T].

    With `packed_rows`, B is 1 and the model is one that `packed_attention.takes_packed_rows`.
    """
    decoder = model.get_decoder()  # type: ignore[operator]
    arguments = packed_rows.decoder_arguments() if packed_rows is not None else {}
    pruned = _pruned_forward_of(decoder)
    if pruned is None:
        return decoder_output(decoder, token_ids, **arguments).flatten(0, 1).index_select(0, positions)
    pruned.positions = positions
    try:
        return decoder_output(decoder, token_ids, **arguments)[0]
    finally:
        pruned.positions = None


@torch.no_grad()
def prune_last_layer(model: nn.Module) -> bool:
    """Lets `hidden_states_at` leave out what nobody reads, where that changes no figure. True when it does."""
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    token_ids = torch.arange(10).reshape(2, 5) % 4
    positions = torch.tensor([1, 4, 7])
    expected_NH = hidden_states_at(model, token_ids, positions)
    try:
        pruned = _PrunedForward(layers[-1])
    except AttributeError:  # built otherwise
        return False
    pruned.put()
    try:
        hidden_NH = hidden_states_at(model, token_ids, positions)
        if hidden_NH.shape == expected_NH.shape and torch.allclose(hidden_NH, expected_NH, atol=_TOLERANCE, rtol=1e-3):
            return True
    except (AttributeError, TypeError, ValueError, RuntimeError):  # built otherwise
        pass
    pruned.remove()
    return False


def _pruned_forward_of(decoder: Any) -> _PrunedForward | None:
    layers = getattr(decoder, "layers", None)
    forward = getattr(layers[-1], "forward", None) if isinstance(layers, nn.ModuleList) and len(layers) else None
    return forward if isinstance(forward, _PrunedForward) else None
