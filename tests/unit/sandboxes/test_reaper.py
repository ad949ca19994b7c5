"""Whose box is it, and is its owner alive?"""

import os

import pytest

from driftgym.sandboxes.reaper import is_owner_alive, own_host, own_label, process_start_time


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
        "a:b:c:d",
        f"{own_host()}1:{2**22 + 1}:5",
    ],
)
def test_what_cannot_be_told_is_left_alone(owner: str) -> None:
    assert is_owner_alive(owner)
