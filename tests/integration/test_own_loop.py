"""The loop that docs/low-level.md shows, with the real learner, a generator server and episodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from driftgym.trainer.checkpoint import check_sealed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "low-level.md").read_text(encoding="utf-8")
SHORT = (
    *("demonstrations.num_episodes=64", "warmup.num_steps=20", "trainer.groups_per_step=2"),
    *("trainer.group_size=4", "trainer.max_in_flight_groups=4"),
)


def test_the_loop_of_the_page_trains(tmp_path: Path) -> None:
    code = re.search(r"^```python\n(# own_loop\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert code is not None
    assert sum(bool(line.strip()) for line in code[1].splitlines()) <= 40
    (tmp_path / "own_loop.py").write_text(code[1], encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    finished = subprocess.run(
        [sys.executable, "-P", "own_loop.py", str(tmp_path / "run"), "3", *SHORT],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert re.findall(r"^step (\d): reward [\d.]+, gradient [\d.]+$", finished.stdout, re.MULTILINE) == ["1", "2", "3"]
    check_sealed(tmp_path / "run" / "checkpoint")
    assert "1-3" in {path.name for path in (tmp_path / "run" / "weights").iterdir()}
