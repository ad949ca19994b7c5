import numpy as np
import pytest
import torch

from driftgym.agents.generators.embedded.sampling import draw_tokens, uniforms


def draw(logits, *, temperature=1.0, top_p=1.0, draws=None):
    rows = torch.tensor(logits, dtype=torch.float32)
    count = len(rows)
    return draw_tokens(
        rows,
        temperatures=np.broadcast_to(np.float32(temperature), count).copy(),
        top_ps=np.broadcast_to(np.float32(top_p), count).copy(),
        draws=np.linspace(0, 1, count, endpoint=False) if draws is None else np.asarray(draws, np.float64),
    )


def test_logprob_is_that_of_the_tempered_distribution():
    """Case: logits [2, 1, 0] at temperature 0.5, token 1: -2.1429; neither the raw -1.4076 nor that over T."""
    drawn = draw([[2.0, 1.0, 0.0]], temperature=0.5, draws=[0.9])
    assert drawn.token_ids.tolist() == [1]
    assert drawn.logprobs[0] == pytest.approx(-2.1429, abs=1e-4)
    greedy = draw([[2.0, 1.0, 0.0]], temperature=0.0, draws=[0.9])
    assert greedy.token_ids.tolist() == [0]
    assert greedy.logprobs[0] == pytest.approx(-0.4076, abs=1e-4)


def test_frequencies_are_the_probabilities():
    probabilities = np.array([0.5, 0.3, 0.1, 0.1])
    count = 20_000
    seeds = np.full(count, 7, np.uint64)
    drawn = draw(np.tile(np.log(probabilities), (count, 1)), draws=uniforms(seeds, np.arange(count, dtype=np.int32)))
    frequencies = np.bincount(drawn.token_ids, minlength=4) / count
    np.testing.assert_allclose(frequencies, probabilities, atol=0.015)
    np.testing.assert_allclose(drawn.logprobs, np.log(probabilities)[drawn.token_ids], atol=1e-5)


def test_nucleus_is_renormalised_and_leaves_other_rows_alone():
    """Probabilities .5/.3/.1/.1 and top-p 0.8: tokens 0 and 1 are left, with .625 and .375."""
    logits = torch.tensor(np.log([[0.1, 0.5, 0.1, 0.3]] * 200), dtype=torch.float32)
    top_ps = np.where(np.arange(200) < 100, 0.79, 1.0).astype(np.float32)
    drawn = draw_tokens(
        logits,
        temperatures=np.ones(200, np.float32),
        top_ps=top_ps,
        draws=np.tile(np.linspace(0, 1, 100, endpoint=False), 2),
    )
    inside = drawn.token_ids[:100]
    assert set(inside.tolist()) == {1, 3}
    np.testing.assert_allclose(drawn.logprobs[:100], np.log(np.where(inside == 1, 0.625, 0.375)), atol=1e-5)
    assert set(drawn.token_ids[100:].tolist()) == {0, 1, 2, 3}
    assert draw([[0.0, 3.0]], top_p=1e-6, draws=[0.999]).token_ids.tolist() == [1]


def test_no_token_of_no_mass_is_drawn():
    logits = [[0.0, -np.inf, 0.0, -np.inf]] * 4
    drawn = draw(logits, draws=[0.0, 0.4999, 0.5001, 1.0 - 2**-53])
    assert drawn.token_ids.tolist() == [0, 0, 2, 2]
    assert np.isfinite(drawn.logprobs).all()


def test_logits_that_are_not_finite_are_seen_in_the_logprob():
    drawn = draw([[np.nan, 1.0], [0.0, 1.0]])
    assert not np.isfinite(drawn.logprobs[0])
    assert np.isfinite(drawn.logprobs[1])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(("largest", "temperature"), [(2.0, 1e-45), (3e38, 0.5), (-3e38, 1e-3)])
def test_no_logit_overflows_by_the_temperature(largest, temperature, top_p):
    drawn = draw([[-np.inf, largest, largest - abs(largest) / 2]] * 3, temperature=temperature, top_p=top_p)
    assert drawn.token_ids.tolist() == [1, 1, 1]
    assert drawn.logprobs.tolist() == [0.0, 0.0, 0.0]


def test_uniforms_depend_on_seed_and_count_alone():
    seeds = np.array([1, 1, 2, 2**64 - 1], np.uint64)
    counts = np.array([0, 1, 0, 5], np.int32)
    draws = uniforms(seeds, counts)
    assert len(set(draws.tolist())) == 4
    assert ((draws >= 0) & (draws < 1)).all()
    for index in range(4):
        assert uniforms(seeds[index : index + 1], counts[index : index + 1])[0] == draws[index]
    many = uniforms(np.arange(10_000, dtype=np.uint64), np.zeros(10_000, np.int32))
    assert many.mean() == pytest.approx(0.5, abs=0.02)
    assert np.corrcoef(many[:-1], many[1:])[0, 1] == pytest.approx(0.0, abs=0.05)
