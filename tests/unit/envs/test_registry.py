import multiprocessing
import os
import subprocess
import sys

import gymnasium
import pytest
from registry_child import make_in_child

from driftgym.config import Limits
from driftgym.envs.registry import check_env_id, list_envs, make_env, register_envs
from driftgym.errors import ConfigError


def _one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_own_environments_are_known():
    assert {"driftgym/Lookup-v0", "driftgym/Process-v0"} <= set(list_envs())
    assert check_env_id("driftgym/Lookup-v0").id == "driftgym/Lookup-v0"
    register_envs()


def test_importing_the_room_imports_no_environment():
    code = (
        "import sys, driftgym.envs\n"
        "heavy = ('driftgym.envs.lookup', 'driftgym.envs.adapters', 'torch')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_gymnasium_finds_it_by_the_module_in_the_id():
    code = "import gymnasium; e = gymnasium.make('driftgym.envs:driftgym/Lookup-v0'); print(e.unwrapped.tools[0].name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "get_age"


def test_unknown_id_names_close_ones():
    with pytest.raises(ConfigError) as caught:
        check_env_id("driftgym/Lokup-v0")
    assert "'driftgym/Lookup-v0'" in _one_line(caught)


@pytest.mark.parametrize(
    "env_id", ["", "nothing", "a/b/c", "zzz/Qqq-v0", "no_such_module:my/Env-v0", ":x", "driftgym/Lookup"]
)
def test_nonsense_ids_are_refused(env_id):
    with pytest.raises(ConfigError) as caught:
        make_env(env_id)
    _one_line(caught)


def test_registered_classes_are_listed_and_foreign_ones_are_not(registered, echo_env_type):
    registered("test/Echo-v0", entry_point=echo_env_type)
    assert "test/Echo-v0" in list_envs()
    assert "CartPole-v1" not in list_envs()


def test_parts_go_to_those_who_name_them(registered, echo_env_type):
    env_id = registered("test/Echo-v0", entry_point=echo_env_type)
    boxes = object()
    env = make_env(env_id, sandboxes=boxes, limits=Limits(tool_call_s=3), kwargs={"leaks": True})
    assert type(env) is echo_env_type
    assert env.sandboxes is boxes
    assert env.limits.tool_call_s == 3
    assert env.leaks
    assert env.spec.kwargs == {"leaks": True}
    again = env.spec.make().unwrapped
    assert again.leaks
    assert again.sandboxes is None


def test_unknown_argument(registered, echo_env_type):
    env_id = registered("test/Echo-v0", entry_point=echo_env_type)
    with pytest.raises(ConfigError) as caught:
        make_env(env_id, kwargs={"leak": True})
    assert "did you mean 'leaks'?" in _one_line(caught)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"levl": "one_call"}, "did you mean 'level'?"),
        ({"level": "three"}, "level"),
        ({"num_people": 2}, "num_people"),
        ({"latency_mean_s": -1}, "latency_mean_s"),
        ({"faults": {"explode": 1}}, "faults"),
        ({"faults": {"hang": 0.6, "raise": 0.6}}, "more than 1"),
    ],
)
def test_bad_arguments_of_lookup(kwargs, said):
    with pytest.raises(ConfigError) as caught:
        make_env("driftgym/Lookup-v0", kwargs=kwargs)
    assert said in _one_line(caught)


def test_a_constructor_that_refuses_is_a_config_error(registered, echo_env_type):
    def create(**kwargs):
        raise ValueError("size must be\neven")

    env_id = registered("test/Refuses-v0", entry_point=create)
    with pytest.raises(ConfigError) as caught:
        make_env(env_id)
    assert "size must be even" in _one_line(caught)


def test_wrappers_that_change_behaviour_are_refused(registered, echo_env_type):
    env_id = registered("test/Limited-v0", entry_point=echo_env_type, max_episode_steps=3)
    with pytest.raises(ConfigError) as caught:
        make_env(env_id)
    assert "TimeLimit" in _one_line(caught)


def test_wrappers_of_the_entry_point_are_refused(registered, echo_env_type):
    def create(**kwargs):
        return gymnasium.wrappers.TransformReward(echo_env_type(), lambda reward: 2 * reward)

    env_id = registered("test/Wrapped-v0", entry_point=create)
    with pytest.raises(ConfigError, match="TransformReward"):
        make_env(env_id)


def test_an_environment_of_another_kind_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"CartPoleEnv is not.*driftgym/Process-v0"):
        make_env("CartPole-v1")


def test_an_entry_point_that_cannot_be_loaded(registered):
    env_id = registered("test/Missing-v0", entry_point="no_such_module:Env")
    with pytest.raises(ConfigError, match="entry point"):
        make_env(env_id)


def test_an_entry_point_whose_module_raises(registered, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise KeyError('SOME_SETTING')")
    monkeypatch.syspath_prepend(tmp_path)
    env_id = registered("test/Raises-v0", entry_point="raises_at_import:Env")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(KeyError: 'SOME_SETTING'\)"):
        make_env(env_id)


def test_a_constructor_without_its_files(registered, echo_env_type):
    class Files(echo_env_type):
        def __init__(self):
            super().__init__()
            open("/no/such/file").close()

    env_id = registered("test/Files-v0", entry_point=Files)
    with pytest.raises(ConfigError, match=r"cannot be made here \(FileNotFoundError: .*/no/such/file"):
        make_env(env_id)


def test_an_id_of_the_parents_script_is_named_in_a_spawned_process(tmp_path, echo_env_type):
    """What the main script registers under `if __name__ == "__main__"` does not exist in a spawned process."""
    (tmp_path / "module_with_env.py").write_text(
        "import gymnasium\nfrom driftgym.envs.lookup.env import LookupEnv\n"
        "gymnasium.register('mine/Toy-v0', entry_point=LookupEnv)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from driftgym.envs.registry import make_env\n"
        "def work(env_id, answers):\n"
        "    try:\n"
        "        answers.put(type(make_env(env_id)).__name__)\n"
        "    except Exception as error:\n"
        "        answers.put(f'{type(error).__name__}: {error}')\n"
        "if __name__ == '__main__':\n"
        "    import module_with_env\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    answers = context.Queue()\n"
        "    for env_id in ('mine/Toy-v0', 'module_with_env:mine/Toy-v0'):\n"
        "        child = context.Process(target=work, args=(env_id, answers)); child.start()\n"
        "        print(answers.get(timeout=60)); child.join(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}  # also where PYTHONSAFEPATH leaves out the script's folder
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100, env=environment
    )
    without_module, with_module = done.stdout.splitlines()
    assert without_module.startswith("ConfigError: environment 'mine/Toy-v0': not registered in this process")
    assert "my_package.envs:my/Env-v0" in without_module
    assert with_module == "LookupEnv"


def test_spawn_is_what_a_worker_uses():
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=make_in_child, args=("driftgym/Lookup-v0", answers))
    child.start()
    assert answers.get(timeout=60) == "LookupEnv"
    child.join(60)
