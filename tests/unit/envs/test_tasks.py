import subprocess
import sys

import pytest

from driftgym.envs.tasks import SeededTasks


def test_same_in_every_process():
    here = [SeededTasks(env_id="my.module:my/Env-v0", seed=5).task(index) for index in range(3)]
    code = (
        "from driftgym.envs.tasks import SeededTasks\n"
        "for i in range(3):\n"
        "    t = SeededTasks(env_id='my.module:my/Env-v0', seed=5).task(i); print(t.task_id, t.seed)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [f"{task.task_id} {task.seed}" for task in here]
    assert here[0].task_id == "Env-v0-5-0"


def test_other_seeds_share_no_task():
    seeds = [{SeededTasks(env_id="e", seed=seed).task(i).seed for i in range(2000)} for seed in (1, 2)]
    assert all(len(group) == 2000 for group in seeds)
    assert not seeds[0] & seeds[1]


def test_metadata_goes_along_and_negative_indices_do_not():
    tasks = SeededTasks(env_id="e", seed=1, metadata={"level": "two_calls"})
    assert tasks.task(0).metadata == {"level": "two_calls"}
    assert tasks.task(0).env_id == "e"
    with pytest.raises(ValueError, match="negative"):
        tasks.task(-1)
