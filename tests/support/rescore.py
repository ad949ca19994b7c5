"""What a model says of given tokens, by the trainer's own scoring in float32."""

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from driftgym.trainer.batching import Row, micro_batch, score_tokens
from driftgym.types import Completion, Float32Array, Segment


@functools.lru_cache(maxsize=8)
def load(folder: Path) -> Any:
    """The model in a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def rescore(folder: Path, prompt: list[int], token_ids: list[int], *, temperature: float = 1.0) -> Float32Array:
    """[L] the log-prob of each of `token_ids`, given all before it."""
    num_tokens = len(prompt) + len(token_ids)
    is_scored = np.arange(num_tokens) >= len(prompt)
    segment = Segment(
        trajectory_id="t",
        segment_index=0,
        token_ids=[*prompt, *token_ids],
        loss_mask=is_scored,
        behaviour_logprobs=np.zeros(num_tokens),
        policy_versions=np.zeros(num_tokens),
        advantages=np.ones(num_tokens),
    )
    batch = micro_batch([Row(segment=segment, token_weight=1.0)], policy_version=0, device=torch.device("cpu"))
    logprobs: Float32Array = score_tokens(load(folder), batch, temperature=temperature).logprobs.numpy()
    return logprobs


def rescore_spans(folders: list[Path], prompt: list[int], completion: Completion) -> Float32Array:
    """[L] each token scored by the weights of its version; the place in `folders` is the version."""
    token_ids = completion.token_ids.tolist()
    scores = np.stack([rescore(folder, prompt, token_ids) for folder in folders])
    return scores[completion.policy_versions, np.arange(len(token_ids))]


@torch.no_grad()
def rescore_kept(old: Path, new: Path, prompt: list[int], completion: Completion) -> Float32Array:
    """[L] the tokens of two versions, the later ones on the KV cache that the older weights had written."""
    ids = [*prompt, *completion.token_ids.tolist()]
    num_old = int((completion.policy_versions == completion.policy_versions[0]).sum())
    num_read = len(prompt) + num_old - 1  # the newest token of the old weights is read by the new ones
    read = load(old)(torch.tensor([ids[:num_read]]), use_cache=True)
    with warnings.catch_warnings():  # later releases call it `cache`, which earlier ones do not know
        warnings.simplefilter("ignore", FutureWarning)
        after = load(new)(torch.tensor([ids[num_read:]]), past_key_values=read.past_key_values)
    logits_TV = torch.cat([read.logits[0], after.logits[0]])[:-1]
    logprobs = torch.log_softmax(logits_TV, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs[len(prompt) - 1 :].numpy()


@torch.no_grad()
def greedy(folder: Path, prompt: list[int], *, num_tokens: int) -> list[int]:
    """The most likely continuation, by transformers' own loop."""
    ids = torch.tensor([prompt])
    out = load(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation
