import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftgym.agents.generators.embedded.requests import WeightsOrder
from driftgym.agents.generators.embedded.weights import WeightsRefusedError
from driftgym.types import SamplingParams

FAMILIES = ["qwen3", "llama"]


@torch.inference_mode()
def scored(model: Any, prompt: np.ndarray, token_ids: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """The log-probs of `token_ids` after `prompt` by one plain forward pass of the whole sequence."""
    sequence = torch.from_numpy(np.concatenate([prompt, token_ids]).astype(np.int64))[None]
    logits = model(sequence).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, sequence[0, len(prompt) :, None])[:, 0].numpy()


def run(engine: Any, prompts: list, sampling: Any, *, prefix: str = "r") -> list:
    """The answers to `prompts`, in their order."""
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    answers: dict[str, Any] = {}
    for index, (prompt, params) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit(f"{prefix}{index}", prompt, params, lambda answer: answers.__setitem__(answer.request_id, answer))
    while engine.has_work:
        engine.step()
    return [answers[f"{prefix}{index}"] for index in range(len(prompts))]


def take(engine: Any, folder: Path, *, flush_cache: bool = True, **order: Any) -> None:
    """Brings the engine to the weights in `folder`."""
    engine.update_weights(engine.weights.read(WeightsOrder(folder=folder, **order)), flush_cache=flush_cache)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(model_of, engine_of, random_prompts, family, temperature):
    model = model_of(family)
    prompts = random_prompts(12)  # more than there are slots, of unequal lengths
    rng = np.random.default_rng(1)
    samplings = [SamplingParams(temperature=temperature, max_tokens=int(rng.integers(1, 30))) for _ in prompts]
    answers = run(engine_of(model, max_batch_size=5), prompts, samplings)
    for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
        assert len(answer.token_ids) == sampling.max_tokens
        assert answer.finish_reason == "length"
        expected = scored(model, prompt, answer.token_ids, temperature=temperature)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_generate(model_of, engine_of, random_prompts, family):
    model = model_of(family)
    prompts = random_prompts(6)
    answers = run(engine_of(model, max_batch_size=4), prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert answer.token_ids.tolist() == generated[0, len(prompt) :].tolist()
        np.testing.assert_allclose(answer.logprobs, scored(model, prompt, answer.token_ids), atol=1e-4)


def test_turns_of_a_session_and_members_of_a_group_reuse_kv(model_of, engine_of, random_prompts):
    model = model_of("qwen3")
    engine = engine_of(model, max_batch_size=4)
    sampling = SamplingParams(max_tokens=10)
    (prompt,) = random_prompts(1, shortest=40, longest=40)
    first = run(engine, [prompt] * 8, sampling, prefix="a")
    assert sum(answer.num_cached_tokens == 39 for answer in first) == 7
    second_prompts = [np.concatenate([prompt, answer.token_ids, prompt[:5]]) for answer in first]
    second = run(engine, second_prompts, sampling, prefix="b")
    assert all(answer.num_cached_tokens >= 39 for answer in second)
    for asked, answer in zip([prompt] * 8 + second_prompts, first + second, strict=True):
        np.testing.assert_allclose(answer.logprobs, scored(model, asked, answer.token_ids), atol=1e-4)


def test_rows_of_many_kinds_in_slots_that_turn_over(model_of, engine_of, random_prompts):
    """Every mix of shared prefixes, lengths, temperatures and early stops keeps the log-probs exact."""
    model = model_of("llama")
    engine = engine_of(model, max_batch_size=3, max_prefill_tokens=64)
    rng = np.random.default_rng(7)
    stems = random_prompts(3, shortest=20, longest=50)
    prompts, samplings = [], []
    for _ in range(40):
        stem = stems[rng.integers(3)]
        prompts.append(
            np.concatenate([stem[: rng.integers(1, len(stem) + 1)], rng.integers(0, 120, rng.integers(0, 9))])
        )
        prompts[-1] = prompts[-1].astype(np.int32)
        samplings.append(
            SamplingParams(
                temperature=float(rng.choice([0.5, 1.0, 1.5])),
                max_tokens=int(rng.integers(1, 25)),
                stop_token_ids=tuple(rng.integers(0, 120, rng.integers(0, 30)).tolist()),
            )
        )
    for prompt, sampling, answer in zip(prompts, samplings, run(engine, prompts, samplings), strict=True):
        expected = scored(model, prompt, answer.token_ids, temperature=sampling.temperature)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        stops = [index for index, token in enumerate(answer.token_ids.tolist()) if token in sampling.stop_token_ids]
        assert (answer.finish_reason == "stop") == bool(stops)
        if stops:
            assert stops == [len(answer.token_ids) - 1]
            assert answer.matched == answer.token_ids[-1]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model_of, engine_of, random_prompts):
    model = model_of("qwen3")
    prompts = random_prompts(9)
    seeded = SamplingParams(max_tokens=25, seed=11)
    (alone,) = run(engine_of(model), prompts[:1], seeded)
    others = [SamplingParams(max_tokens=20, top_p=0.9) for _ in prompts[1:]]
    among = run(engine_of(model), prompts, [seeded, *others])[0]
    again = run(engine_of(model, max_batch_size=2), [*prompts[1:], prompts[0]], [*others, seeded])[-1]
    assert alone.token_ids.tolist() == among.token_ids.tolist() == again.token_ids.tolist()
    (other,) = run(engine_of(model), prompts[:1], SamplingParams(max_tokens=25, seed=12))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_taken_in_flight(model_of, engine_of, random_prompts, save_model, family):
    """Every span of every answer re-scores with the weights of its version, and no token is lost."""
    models = {version: model_of(family, seed=version) for version in (0, 1, 2)}
    folders = {version: save_model(model, f"v{version}") for version, model in models.items()}
    served_model = model_of(family, seed=0)
    engine = engine_of(served_model, max_batch_size=16)
    prompts = random_prompts(16)
    answers: dict[str, Any] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=20 + index, temperature=0.7)
        engine.submit(str(index), prompt, sampling, lambda answer: answers.__setitem__(answer.request_id, answer))
    for version in (1, 2):
        for _ in range(6):
            engine.step()
        engine.pause("retract")
        assert engine.num_running == 0
        take(engine, folders[version], version=f"1:{version}")
        engine.resume()
    while engine.has_work:
        engine.step()
    for index, prompt in enumerate(prompts):
        answer = answers[str(index)]
        assert len(answer.token_ids) == 20 + index
        assert [span.version for span in answer.spans] == ["1:0", "1:1", "1:2"]
        assert answer.kv_min_version is None
        for span in answer.spans:
            before = np.concatenate([prompt, answer.token_ids[: span.start]])
            tokens = answer.token_ids[span.start : span.end]
            model = models[int(span.version.split(":")[1])]
            expected = scored(model, before, tokens, temperature=0.7)
            np.testing.assert_allclose(answer.logprobs[span.start : span.end], expected, atol=1e-4)


def test_kv_that_was_kept_is_said(model_of, engine_of, random_prompts, save_model):
    engine = engine_of(model_of("qwen3"))
    folder = save_model(model_of("qwen3", seed=1), "new")
    (prompt,) = random_prompts(1, shortest=30)
    answers = []
    engine.submit("a", prompt, SamplingParams(max_tokens=10), answers.append)
    for _ in range(4):
        engine.step()
    engine.pause("in_place")
    with pytest.raises(WeightsRefusedError, match="retract"):
        take(engine, folder, version="1:1")
    assert engine.version == "1:0"
    take(engine, folder, version="1:1", flush_cache=False)
    engine.resume()
    while engine.has_work:
        engine.step()
    assert [(span.version, span.end - span.start) for span in answers[0].spans] == [("1:0", 5), ("1:1", 5)]
    assert answers[0].kv_min_version == "1:0"
    # A later prompt that takes over the old KV says so too; one that does not, does not.
    later, fresh = run(
        engine, [np.append(prompt, 3).astype(np.int32), prompt[::-1].copy()], SamplingParams(max_tokens=3)
    )
    assert (later.kv_min_version, fresh.kv_min_version) == ("1:0", None)
    take(engine, folder, version="1:2")
    (flushed,) = run(engine, [prompt], SamplingParams(max_tokens=3))
    assert (flushed.kv_min_version, flushed.num_cached_tokens) == (None, 0)


def test_a_pause_changes_no_token(model_of, engine_of, random_prompts):
    model = model_of("qwen3")
    prompts = random_prompts(5)
    sampling = SamplingParams(max_tokens=15, seed=3)
    expected = [answer.token_ids.tolist() for answer in run(engine_of(model), prompts, sampling)]
    for mode in ("retract", "in_place"):
        engine = engine_of(model)
        answers: dict[str, Any] = {}
        for index, prompt in enumerate(prompts):
            engine.submit(
                str(index), prompt, sampling, lambda answer, got=answers: got.update({answer.request_id: answer})
            )
        for _ in range(5):
            engine.step()
        engine.pause(mode)
        assert not engine.has_work
        busy_s = engine.busy_s
        engine.step()
        assert engine.busy_s == busy_s
        engine.resume()
        while engine.has_work:
            engine.step()
        assert [answers[str(index)].token_ids.tolist() for index in range(5)] == expected
        assert all(answer.queue_s > 0 for answer in answers.values())


def test_abort_gives_what_there_is(model_of, engine_of, random_prompts):
    engine = engine_of(model_of("qwen3"), max_batch_size=2)
    answers: dict[str, Any] = {}
    for index, prompt in enumerate(random_prompts(4)):
        engine.submit(str(index), prompt, SamplingParams(max_tokens=30), lambda a: answers.__setitem__(a.request_id, a))
    for _ in range(3):
        engine.step()
    engine.abort("0")
    engine.abort("unknown")
    assert set(answers) == {"0"}
    assert (answers["0"].finish_reason, len(answers["0"].token_ids), len(answers["0"].logprobs)) == ("abort", 4, 4)
    engine.pause("abort")
    assert set(answers) == {"0", "1", "2", "3"}
    assert len(answers["3"].token_ids) == 0
    assert engine.num_running == engine.num_queued == 0
    engine.resume()
    assert len(run(engine, random_prompts(1), SamplingParams(max_tokens=2), prefix="again")[0].token_ids) == 2


def test_refused_weights_change_nothing(model_of, engine_of, random_prompts, save_model, tmp_path):
    engine = engine_of(model_of("qwen3"))
    (prompt,) = random_prompts(1)
    sampling = SamplingParams(max_tokens=5, seed=1)
    before = run(engine, [prompt], sampling)[0]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"nonsense")
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (broken, empty, tmp_path / "absent", save_model(model_of("llama"), "other")):
        with pytest.raises(WeightsRefusedError):
            take(engine, Path(folder), version="1:1")
        assert engine.version == "1:0"
    after = run(engine, [prompt], sampling, prefix="after")[0]
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_and_untied_weights_are_taken(model_of, engine_of, random_prompts, save_model, is_tied):
    engine = engine_of(model_of("llama", is_tied=is_tied))
    new = model_of("llama", seed=5, is_tied=is_tied)
    take(engine, save_model(new, "new"), version="1:1")
    (prompt,) = random_prompts(1)
    (answer,) = run(engine, [prompt], SamplingParams(max_tokens=5))
    np.testing.assert_allclose(answer.logprobs, scored(new, prompt, answer.token_ids), atol=1e-4)


def test_weights_that_are_not_finite_fail_their_requests_only(model_of, engine_of, random_prompts, save_model):
    good, bad = model_of("qwen3"), model_of("qwen3")
    with torch.no_grad():
        bad.model.layers[0].mlp.down_proj.weight[0] = torch.nan
    engine = engine_of(model_of("qwen3"))
    good_folder = save_model(good, "good")
    take(engine, save_model(bad, "bad"), version="1:1")
    prompts = random_prompts(8)
    for answer in run(engine, prompts, SamplingParams(max_tokens=5)):
        assert (answer.finish_reason, answer.is_failure, len(answer.token_ids)) == ("abort", True, 0)
    take(engine, good_folder, version="1:2")
    for prompt, answer in zip(prompts, run(engine, prompts, SamplingParams(max_tokens=5), prefix="b"), strict=True):
        np.testing.assert_allclose(answer.logprobs, scored(good, prompt, answer.token_ids), atol=1e-4)


def test_what_cannot_be_served_is_refused(model_of, engine_of):
    engine = engine_of(model_of("qwen3"), max_context_tokens=32)
    submit = itertools.count()
    for prompt, sampling in [
        ([], SamplingParams(max_tokens=1)),
        ([120], SamplingParams(max_tokens=1)),
        ([-1], SamplingParams(max_tokens=1)),
        ([1] * 30, SamplingParams(max_tokens=3)),
    ]:
        with pytest.raises(ValueError, match=r"prompt"):
            engine.submit(str(next(submit)), np.array(prompt, np.int32), sampling, print)
    engine.submit("twice", np.array([1] * 30, np.int32), SamplingParams(max_tokens=2), lambda answer: None)
    with pytest.raises(ValueError, match="in use"):
        engine.submit("twice", np.array([1], np.int32), SamplingParams(max_tokens=1), print)
    while engine.has_work:
        engine.step()
    engine.submit("twice", np.array([1], np.int32), SamplingParams(max_tokens=1), lambda answer: None)
