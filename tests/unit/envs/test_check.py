import pytest

from driftgym.envs.base import Grade
from driftgym.envs.check import check_tool_env
from driftgym.envs.tools import ToolSchema
from driftgym.errors import ConfigError, EnvError
from driftgym.types import TrajectoryStatus


def _findings(registered, env_type, **kwargs):
    return check_tool_env(registered("test/Checked-v0", entry_point=env_type), kwargs=kwargs)


def test_nothing_is_found_on_a_sound_environment(registered, echo_env_type):
    assert _findings(registered, echo_env_type) == []


def test_state_that_leaks_is_found(registered, echo_env_type):
    findings = _findings(registered, echo_env_type, leaks=True)
    assert any("the same seed gives other messages the second time" in finding for finding in findings)
    assert any("leaks" in finding for finding in findings)


def test_bad_tools_are_found(registered, echo_env_type):
    class BadTools(echo_env_type):
        @property
        def tools(self):
            return (
                ToolSchema(name="not a name", description="", parameters={"type": "object"}),
                ToolSchema(name="t", description="d", parameters={"type": "list"}),
            )

    findings = "\n".join(_findings(registered, BadTools))
    assert "'not a name': a name has" in findings
    assert "'not a name': has no description" in findings
    assert "tool t: parameters" in findings


def test_a_grade_that_fails_for_a_status_is_found(registered, echo_env_type):
    class Strict(echo_env_type):
        async def grade(self, status):
            if status is TrajectoryStatus.TRUNCATED_TIME:
                raise EnvError("no answer, no grade")
            return await super().grade(status)

    assert any("no answer, no grade" in finding for finding in _findings(registered, Strict))


@pytest.mark.parametrize(
    "grade", [Grade(reward=float("nan")), Grade(reward=1e39), Grade(reward=1.0, parts={"p": -1e31})]
)
def test_a_grade_that_no_episode_may_have_is_found(registered, echo_env_type, grade):
    class Extreme(echo_env_type):
        async def grade(self, status):
            return grade

    assert any("not finite, or above 1e+12" in finding for finding in _findings(registered, Extreme))


def test_an_environment_that_raises_is_a_finding_with_the_place(registered, echo_env_type):
    class Broken(echo_env_type):
        async def astep(self, action):
            return {}["nothing"]

    findings = _findings(registered, Broken)
    assert any("KeyError: 'nothing'" in finding and "test_check.py" in finding for finding in findings)


def test_an_unseeded_world_is_found(registered, echo_env_type):
    class Unseeded(echo_env_type):
        async def areset(self, *, seed=None, options=None):
            return await super().areset(seed=None, options=options)

        def episode_seed(self, seed):
            return id(object()) + self.num_resets

    assert any("gymnasium's check_env" in finding for finding in _findings(registered, Unseeded))


def test_unknown_environment():
    with pytest.raises(ConfigError):
        check_tool_env("test/Nothing-v0")


def test_a_foreign_environment_is_checked_through_its_process():
    assert check_tool_env("driftgym/Process-v0", kwargs={"env_id": "CartPole-v1"}) == []
    findings = check_tool_env("driftgym/Process-v0", kwargs={"env_id": "CartPole-v99"})
    assert any("CartPole-v1" in finding for finding in findings)
