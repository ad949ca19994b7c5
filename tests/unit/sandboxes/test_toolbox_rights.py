"""What children of the toolbox give up, as far as it can be seen without a box."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import driftgym
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.docker_settings import toolbox_settings
from driftgym.sandboxes.toolbox_rights import FILE_OPS, NOBODY, Rights, find_call

ROOT = str(Path(driftgym.__file__).parent.parent)


def test_functions_of_the_c_library() -> None:
    find = find_call("getpid")
    assert find is not None
    assert find() == os.getpid()
    assert find_call("no_such_function_at_all") is None


@pytest.mark.parametrize("is_writable", [True, False])
def test_what_children_load_is_there_before_an_agent_can_write_it(is_writable: bool) -> None:
    settings = toolbox_settings(SandboxSpec(read_only_root=not is_writable))
    assert settings["is_root_writable"] == is_writable
    program = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "import driftgym.sandboxes.toolbox as toolbox\n"
        "from driftgym.sandboxes.toolbox_rights import Rights\n"
        f"before = set(sys.modules); rights = Rights({settings!r})\n"
        "print('tarfile' in sys.modules and 'fcntl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{is_writable}\n"


def users_of_a_child(settings: dict[str, object], op: str) -> list[str]:
    """The users of a process that has given up its rights, as the kernel lists them, and its capabilities."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Rights(settings).give_up(op, 7)
            lines = Path("/proc/self/status").read_text().splitlines()
            words = {line.partition(":")[0]: line.split()[1:] for line in lines}
            os.write(write_end, " ".join([*words["Uid"], words["CapPrm"][0], words["CapEff"][0]]).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with open(read_end) as file:
        return file.read().split()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_work_on_files_keeps_its_process_out_of_reach() -> None:
    settings = toolbox_settings(SandboxSpec())
    for op in FILE_OPS:
        assert users_of_a_child(settings, op) == ["0", str(NOBODY), "0", "1000", "0" * 16, "0" * 16]
    for op in ("exec", "spawn"):
        assert users_of_a_child(settings, op) == ["1000"] * 4 + ["0" * 16] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_commands_of_root_keep_what_they_are_given() -> None:
    settings = toolbox_settings(SandboxSpec(run_as_root=True))
    for op in ("exec", "read"):
        *users, permitted, effective = users_of_a_child(settings, op)
        assert users == ["0"] * 4
        assert permitted == effective == "00000000000000eb"


def test_a_local_box_gives_up_nothing() -> None:
    Rights({"uid": None}).give_up("read", 7)
    assert os.getresuid()[0] == os.getuid()
