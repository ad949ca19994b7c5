"""The figures of the benchmark of boxes: what they are computed from, and their forms."""

import dataclasses
import json

import pytest

from driftgym.sandboxes.bench_figures import BenchFigures, BoxLatencies, Latency, Rates


def test_a_latency_is_in_milliseconds_and_ordered() -> None:
    latency = Latency.of([n / 1000 for n in range(100, 0, -1)])
    assert latency == Latency(num_calls=100, p50_ms=50.5, p99_ms=100.0, max_ms=100.0)
    assert Latency.of([n / 1000 for n in range(1, 1001)]).p99_ms == 991.0
    assert Latency.of([0.25]) == Latency(num_calls=1, p50_ms=250.0, p99_ms=250.0, max_ms=250.0)


def test_the_share_is_that_of_turns_side_by_side() -> None:
    rates = Rates(concurrency=16, boxes_per_turn=8, pool_per_s=(1.0, 4.5, 8.0), engine_per_s=(2.0, 5.0, 8.0))
    assert rates.pool_share == 0.9
    with pytest.raises(ValueError, match="zip"):
        _ = dataclasses.replace(rates, engine_per_s=(1.0,)).pool_share


@pytest.fixture
def figures() -> BenchFigures:
    latency = Latency.of([0.001])
    box = BoxLatencies(exec_argv=latency, exec_shell=latency, ask=latency, reset=None)
    return BenchFigures(
        image="driftgym/base:debian",
        runtime=None,
        num_cores=2,
        load_1min=0.5,
        wall_s=1.0,
        toolbox=None,
        engine=box,
        cold_start=latency,
        warm_acquire=latency,
        rates=Rates(concurrency=16, boxes_per_turn=8, pool_per_s=(4.5,), engine_per_s=(5.0,)),
    )


def test_figures_are_json_with_the_share(figures: BenchFigures) -> None:
    read = json.loads(json.dumps(figures.as_dict()))
    assert read["rates"]["pool_share"] == 0.9
    assert read["toolbox"] is None
    assert read["engine"]["exec_argv"] == {"num_calls": 1, "p50_ms": 1.0, "p99_ms": 1.0, "max_ms": 1.0}


def test_what_was_not_measured_is_not_shown(figures: BenchFigures) -> None:
    lines = figures.describe().splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "cold start",
        "warm acquire",
        "engine: exec, argv",
        "engine: exec, shell",
        "engine: ask",
        "boxes per second",
    ]
    assert "share 0.90" in lines[-1]
