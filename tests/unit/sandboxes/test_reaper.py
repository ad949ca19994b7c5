"""Whose box is it, and is its owner alive?"""

import os

import pytest

from driftgym.sandboxes.base import SandboxInfo, SandboxSpec
from driftgym.sandboxes.owners import is_owner_alive, own_host, own_label, process_start_time
from driftgym.sandboxes.reaper import (
    ABANDONED_AFTER_S,
    LEASE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    is_left_over,
    labels_of,
)


def test_this_process_is_alive() -> None:
    assert is_owner_alive(own_label())


def test_process_id_that_is_used_again_is_not_the_owner() -> None:
    started = process_start_time(os.getpid())
    assert started is not None
    assert not is_owner_alive(f"{own_host()}:{os.getpid()}:{started - 1}")


def test_process_that_is_gone_is_dead() -> None:
    assert process_start_time(2**22 + 1) is None
    assert not is_owner_alive(f"{own_host()}:{2**22 + 1}:5")


@pytest.mark.parametrize(
    "owner",
    [
        "",
        "x",
        "elsewhere:1:1",
        ":::",
        f"{own_host()}:x:1",
        f"{own_host()}:²:1",
        f"{own_host()}:{'9' * 5000}:1",
        "a:b:c:d",
        f"{own_host()}1:{2**22 + 1}:5",
    ],
)
def test_what_cannot_be_told_is_left_alone(owner: str) -> None:
    assert is_owner_alive(owner)


def test_labels_say_whose_box_it_is_and_how_long_it_outlives_silence() -> None:
    labels = labels_of(SandboxSpec(dead_man_s=2.5), run_id="a run")
    assert labels == {OWNER_LABEL: own_label(), RUN_LABEL: "a run", LEASE_LABEL: "2.5"}


def box(owner: str, *, state: str, age_s: float, is_leased: bool = True) -> SandboxInfo:
    labels = {LEASE_LABEL: "60"} if is_leased else {}
    is_alive = is_owner_alive(owner)
    return SandboxInfo(sandbox_id="1f", owner=owner, state=state, age_s=age_s, owner_is_alive=is_alive, labels=labels)


@pytest.mark.parametrize(
    ("case", "is_left"),
    [
        (box(f"{own_host()}:{2**22 + 1}:5", state="running", age_s=0), True),
        (box(own_label(), state="created", age_s=2 * ABANDONED_AFTER_S), False),
        (box("elsewhere:1:1", state="running", age_s=2 * ABANDONED_AFTER_S), False),
        (box("elsewhere:1:1", state="created", age_s=1), False),
        (box("elsewhere:1:1", state="created", age_s=2 * ABANDONED_AFTER_S), True),
        (box("elsewhere:1:1", state="exited", age_s=2 * ABANDONED_AFTER_S), True),
        (box("nonsense", state="created", age_s=2 * ABANDONED_AFTER_S, is_leased=False), False),
    ],
    ids=["dead", "own", "runs", "young", "never-started", "ended", "foreign"],
)
def test_left_over_is_what_nobody_can_want(case: SandboxInfo, is_left: bool) -> None:
    assert is_left_over(case) == is_left


def test_process_of_another_user_that_is_not_shown_counts_as_alive() -> None:
    from driftgym.sandboxes.owners import _is_hidden

    assert _is_hidden(os.getpid())
    assert not _is_hidden(2**22 + 1)
    assert not _is_hidden(2**70)
