"""The supervised warm-up: its rows, and that it teaches."""

import numpy as np
import pytest

from driftgym.trainer.learner import Learner
from driftgym.trainer.learner_config import WarmupConfig
from driftgym.trainer.ranks import shares
from driftgym.trainer.warmup import copy_segment, imitated, warmup_batches, warmup_learning_rate


def _batches(segments, *, seed=0, **config):
    return list(warmup_batches(segments, config=WarmupConfig(**config), ordinary_token_ids=range(3, 61), seed=seed))


def test_a_copy_says_ordinary_tokens_twice_with_the_loss_on_the_second(make_segment):
    segment = copy_segment(np.random.default_rng(0), range(3, 61), number=0)
    first, second = np.split(segment.token_ids, 2)
    assert first.tolist() == second.tolist()
    assert len(first) == 30
    assert first.min() >= 3
    assert segment.loss_mask.tolist() == [False] * 30 + [True] * 30


def test_a_share_of_each_batch_is_copies(make_segment):
    segments = [make_segment(seed=index) for index in range(5)]
    batches = _batches(segments, num_steps=7, batch_size=8, copy_fraction=0.25)
    assert len(batches) == 7
    for rows in batches:
        names = [row.segment.trajectory_id for row in rows]
        assert len(names) == 8
        assert [name for name in names if name.startswith("copy")] == ["copy-0", "copy-1"]
        num_tokens = sum(int(row.segment.loss_mask.sum()) for row in rows)
        assert {row.token_weight for row in rows} == {1.0 / num_tokens}


def test_several_processes_share_copies(make_segment):
    (rows,) = _batches([make_segment(seed=0)], num_steps=1, batch_size=8, copy_fraction=1.0)
    assert [len(share) for share in shares(rows, num=4)] == [2, 2, 2, 2]


def test_each_demonstration_comes_once_before_any_comes_again(make_segment):
    segments = [make_segment(seed=index) for index in range(5)]
    batches = _batches(segments, num_steps=10, batch_size=2, copy_fraction=0.0)
    names = [row.segment.trajectory_id for rows in batches for row in rows]
    assert all(len(set(names[start : start + 5])) == 5 for start in range(0, 20, 5))


def test_the_seed_decides_the_rows(make_segment):
    segments = [make_segment(seed=index) for index in range(5)]

    def said(seed):
        batches = _batches(segments, seed=seed, num_steps=3, batch_size=4)
        return [row.segment.token_ids.tolist() for rows in batches for row in rows]

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_every_sampled_token_is_imitated(make_segment):
    segment = imitated(make_segment(seed=0, advantage=-3.0))
    assert segment.advantages.tolist() == segment.loss_mask.tolist()


def test_without_demonstrations_there_is_no_warmup():
    with pytest.raises(ValueError, match="demonstrations"):
        _batches([], num_steps=1)


def test_the_learning_rate_rises_and_falls():
    config = WarmupConfig(num_steps=100, learning_rate=1e-2)
    rates = [warmup_learning_rate(config, step) for step in range(100)]
    assert max(rates) == pytest.approx(1e-2)
    assert rates[0] < rates[4]
    assert rates[-1] < 2e-3
    assert min(rates) > 0


def test_it_teaches_the_demonstrations_and_keeps_version_0(learner_spec, make_segment):
    warmup = WarmupConfig(num_steps=60, batch_size=8, learning_rate=1e-2, copy_fraction=0.0)
    learner = Learner(learner_spec(warmup=warmup))
    segments = [make_segment(seed=index, num_prompt=3, spans=(3, 1, 2)) for index in range(4)]
    figures = learner.warm_up(segments)
    assert figures["warmup_loss_first"] > 3.0
    assert figures["warmup_loss_last"] < 0.5
    assert learner.policy_version == 0


def test_rl_after_a_warmup_starts_with_a_fresh_optimizer(learner_spec, make_segment, tmp_path):
    warmup = WarmupConfig(num_steps=2, batch_size=2)
    learner = Learner(learner_spec(warmup=warmup))
    learner.warm_up([make_segment(seed=0)])
    learner.save(tmp_path / "0")
    fresh = Learner(learner_spec(warmup=warmup))
    fresh.load(tmp_path / "0", policy_version=0)
    segments = [make_segment(seed=1)]
    assert fresh.train_step(segments).metrics["loss"] == learner.train_step(segments).metrics["loss"]
