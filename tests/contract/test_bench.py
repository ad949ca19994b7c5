"""The benchmark of boxes measures all that it names, on a real engine, and leaves nothing."""

import pytest
from docker_engine import busybox_image, open_docker

from driftgym.errors import ConfigError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.bench import BenchPlan, measure
from driftgym.sandboxes.owners import own_label
from driftgym.sandboxes.reaper import RUN_LABEL

pytestmark = pytest.mark.docker
ONCE = BenchPlan(
    num_execs=1, num_engine_execs=1, num_resets=1, num_starts=1, num_acquires=1, num_turns=1, boxes_per_turn=2
)


@pytest.mark.slow
@pytest.mark.parametrize("has_python", [True, False])
async def test_every_figure_is_measured_and_no_box_left(has_python: bool) -> None:
    provider = await open_docker()
    try:
        image = None if has_python else await busybox_image(provider.engine)
        shares: list[float] = []
        figures = await measure(
            SandboxSpec(image=image), plan=ONCE, on_progress=lambda text, share: shares.append(share)
        )
        assert (figures.toolbox is not None) == has_python
        assert figures.toolbox is None or figures.toolbox.reset is not None
        assert figures.engine.exec_argv.p50_ms > 0
        assert len(figures.rates.pool_per_s) == len(figures.rates.engine_per_s) == 1
        assert figures.rates.pool_share > 0
        assert shares == sorted(shares)
        mine = (own_label(), "bench")
        assert [box for box in await provider.list() if (box.owner, box.labels[RUN_LABEL]) == mine] == []
    finally:
        await provider.close()


async def test_a_missing_image_is_told() -> None:
    await (await open_docker()).close()
    with pytest.raises(ConfigError, match="driftgym/no-such-image:1 is missing"):
        await measure(SandboxSpec(image="driftgym/no-such-image:1"), plan=ONCE, on_progress=lambda text, share: None)
