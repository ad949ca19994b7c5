import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from driftgym.agents.episode import EpisodeId
from driftgym.agents.rendering import Renderer
from driftgym.agents.rollout import EpisodeOptions, RolloutConfig, run_episode, run_group
from driftgym.agents.tool_agent import AgentConfig, ToolAgent
from driftgym.config import Limits
from driftgym.envs.base import Grade, StepResult
from driftgym.envs.slots import EnvSlots
from driftgym.errors import EnvError, GeneratorError, SandboxError
from driftgym.types import Completion, Message, Task, Trajectory, TrajectoryGroup, TrajectoryStatus

ADD = '<tool_call>{"name":"add","arguments":{"a":4,"b":1}}</tool_call>'
READ = '<tool_call>{"name":"read","arguments":{}}</tool_call>'
QUICK = Limits(tool_call_s=0.2, generation_s=1.0, episode_s=5.0, sandbox_start_s=0.2, grade_s=0.2, close_s=0.5)
S = TrajectoryStatus


class Stage:
    """An agent over a script, an environment and what is reported of the episodes."""

    def __init__(self, compact: Renderer, encode: Any, generator_type: Any, env_type: Any) -> None:
        self.compact = compact
        self.encode = encode
        self.generator_type = generator_type
        self.env_type = env_type
        self.envs: list[Any] = []
        self.started: list[str] = []
        self.ended: list[Trajectory] = []
        self.generator: Any = None

    def agent(self, script: list[Any], *, delay_s: float = 0.0, **config: Any) -> ToolAgent:
        stop = self.compact.stop_token_ids[0]
        self.generator = self.generator_type(self.encode, stop, script, delay_s=delay_s)
        return ToolAgent(self.generator, self.compact, AgentConfig(**config))

    async def play(
        self, script: list[Any], task: Task, *, faults: dict[str, Any] | None = None, **settings: Any
    ) -> Trajectory:
        limits = settings.pop("limits", QUICK)
        agent = self.agent(script, delay_s=settings.pop("delay_s", 0.0), **settings.pop("agent", {}))
        self.envs.append(self.env_type(limits=limits, faults=faults))
        options = EpisodeOptions(
            limits=limits,
            config=RolloutConfig(**settings),
            on_started=self.started.append,
            on_ended=self.ended.append,
        )
        return await run_episode(
            self.envs[-1], agent, task, episode_id=EpisodeId(group_id="g", member=1, attempt=2), options=options
        )

    async def group(self, agent: Any, task: Task, *, size: int, make: Any = None, **settings: Any) -> TrajectoryGroup:
        def make_env() -> Any:
            self.envs.append(self.env_type(limits=QUICK) if make is None else make(len(self.envs)))
            if isinstance(self.envs[-1], Exception):
                raise self.envs[-1]
            return self.envs[-1]

        slots = EnvSlots(make_env, num_slots=settings.pop("num_slots", size))
        try:
            return await run_group(
                task,
                group_id="g",
                group_size=size,
                agent=agent,
                slots=slots,
                limits=QUICK,
                config=RolloutConfig(**settings),
                min_policy_version=3,
                on_started=self.started.append,
                on_ended=self.ended.append,
            )
        finally:
            await slots.close()


@pytest.fixture
def stage(compact: Renderer, encode_tiny: Any, generator_type: Any, env_type: Any) -> Stage:
    return Stage(compact, encode_tiny, generator_type, env_type)


async def hang() -> None:
    await asyncio.sleep(60)


async def test_an_episode_is_recorded_turn_by_turn(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([ADD, "5"], task)
    assert trajectory.status is S.COMPLETED
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"add": 1.0})
    assert trajectory.trajectory_id == "g-1-2"
    assert (trajectory.group_id, trajectory.member, trajectory.attempt, trajectory.task_id) == ("g", 1, 2, "t")
    first, second = trajectory.turns
    assert [message.text for message in first.observation] == ["5"]
    assert second.observation == ()
    assert second.action.text == "5"
    assert trajectory.started_at <= trajectory.ended_at
    assert stage.started == ["g-1-2"]
    assert stage.ended == [trajectory]
    assert stage.envs[0].statuses == [S.COMPLETED]


async def test_what_is_trained_is_exactly_what_was_sampled(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([ADD, ADD, "5"], task)
    sampled = [ids for turn in trajectory.turns for ids in turn.completion.token_ids.tolist()]
    scripted = [ids for text in (ADD, ADD, "5") for ids in [*stage.encode(text), stage.compact.stop_token_ids[0]]]
    assert sampled == scripted
    whole: list[int] = []
    for turn in trajectory.turns:
        whole += [*turn.new_prompt_token_ids.tolist()]
        assert stage.generator.requests.pop(0)["prompt"] == whole
        whole += turn.completion.token_ids.tolist()


async def test_an_unknown_tool_is_an_observation_and_the_episode_goes_on(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([READ, ADD, "5"], task)
    assert trajectory.status is S.COMPLETED
    (reply,) = trajectory.turns[0].observation
    assert reply.role == "tool"
    assert "unknown tool 'read'" in reply.text
    assert trajectory.events["unknown_tool"] == 1


async def test_bad_calls_are_answered_in_order_beside_the_good_one(stage: Stage, task: Task) -> None:
    broken = '<tool_call>{"name":"add","arguments":{"a":1,,}}</tool_call>'
    no_object = '<tool_call>{"name":"add","arguments":[1,2]}</tool_call>'
    trajectory = await stage.play([ADD + broken + no_object, "5"], task)
    replies = trajectory.turns[0].observation
    assert [reply.tool_call_id for reply in replies] == ["call_0", "call_1", "call_2"]
    assert replies[0].text == "5"
    assert all(reply.text.startswith("error:") for reply in replies[1:])
    assert stage.envs[0].counts["add"] == 1
    assert trajectory.events["policy_error"] == 2


async def test_code_in_an_answer_is_no_call(stage: Stage, task: Task) -> None:
    answer = f'So:\n```json\n{{"name":"demo-pkg","version":"2.1.0"}}\n```\n```\n{ADD}\n```'
    trajectory = await stage.play([answer], task)
    assert trajectory.status is S.COMPLETED
    assert trajectory.turns[0].action.text == answer
    assert stage.envs[0].counts["add"] == 0


async def test_non_ascii_arguments_reach_the_tool_and_stay_as_sampled(stage: Stage, task: Task) -> None:
    arguments = '{"город":"Łódź","emoji":"🧪","raw":"\\\\u00e9 stays literal"}'
    call = f'<tool_call>{{"name":"say","arguments":{arguments}}}</tool_call>'
    trajectory = await stage.play([call, "ok"], task)
    assert stage.envs[0].said == [{"город": "Łódź", "emoji": "🧪", "raw": "\\u00e9 stays literal"}]
    first, second = (request["prompt"] for request in stage.generator.requests)
    assert second[: len(first) + len(stage.encode(call))] == [*first, *stage.encode(call)]
    assert len(trajectory.turns) == 2


async def test_calls_beyond_the_limit_are_refused(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([ADD * 3, "5"], task, max_tool_calls_per_turn=1)
    assert [reply.text for reply in trajectory.turns[0].observation][1:] == [
        "error: at most 1 calls in one message"
    ] * 2
    assert stage.envs[0].counts["add"] == 1


@pytest.mark.parametrize("answer", ["The answer is...", '<tool_call>{"name":"add","argum...', "..."])
async def test_an_answer_cut_before_a_whole_call_ends_the_episode_and_is_graded(
    stage: Stage, task: Task, answer: str
) -> None:
    trajectory = await stage.play([ADD, answer], task)
    assert trajectory.status is S.TRUNCATED_TOKENS
    assert trajectory.reward == 1.0
    assert trajectory.events["completion_cut"] == 1
    assert len(trajectory.turns) == 2
    assert len(stage.envs[0].seen) == 1
    assert stage.envs[0].statuses == [S.TRUNCATED_TOKENS]


async def test_a_whole_call_before_the_cut_is_played(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([f"{ADD} and now...", "5"], task)
    assert trajectory.status is S.COMPLETED
    assert stage.envs[0].counts["add"] == 1


async def test_no_room_for_an_answer_ends_the_episode_and_is_graded(stage: Stage, task: Task) -> None:
    room = len(stage.compact.first_prompt([Message(role="user", content="add 4 and 1")], stage.env_type().tools))
    trajectory = await stage.play([ADD, "5"], task, agent={"max_context_tokens": room + 4})
    assert trajectory.status is S.TRUNCATED_TOKENS
    assert len(trajectory.turns) == 1
    assert stage.envs[0].statuses == [S.TRUNCATED_TOKENS]


async def test_the_turn_limit_is_exact(stage: Stage, task: Task) -> None:
    trajectory = await stage.play([ADD], task, max_turns=3)
    assert trajectory.status is S.TRUNCATED_TURNS
    assert len(trajectory.turns) == 3
    assert trajectory.reward == 3.0
    in_time = await stage.play([ADD, ADD, "5"], task, max_turns=3)
    assert in_time.status is S.COMPLETED


async def test_the_clock_ends_an_episode_which_is_graded(stage: Stage, task: Task) -> None:
    limits = QUICK.model_copy(update={"episode_s": 0.15})

    async def slow() -> None:
        await asyncio.sleep(0.1)

    trajectory = await stage.play([ADD], task, faults={"astep": slow}, limits=limits, max_turns=100)
    assert trajectory.status is S.TRUNCATED_TIME
    assert trajectory.reward is not None
    assert trajectory.events["step_cut"] == 1
    assert trajectory.turns[-1].observation == ()


async def test_the_clock_stands_still_while_a_request_waits(stage: Stage, task: Task) -> None:
    # The generator's answers say a latency of 0: all the time that they take was spent queued or paused.
    limits = QUICK.model_copy(update={"episode_s": 0.2})
    trajectory = await stage.play([ADD, ADD, ADD, "5"], task, delay_s=0.1, limits=limits)
    assert trajectory.status is S.COMPLETED


async def test_time_spent_decoding_counts(stage: Stage, task: Task) -> None:
    ids = stage.encode("5")
    slow = Completion(
        request_id="r", token_ids=ids, logprobs=[0.0], policy_versions=[0], finish_reason="stop", latency_s=0.1
    )
    limits = QUICK.model_copy(update={"episode_s": 0.05})
    trajectory = await stage.play([slow], task, delay_s=0.1, limits=limits)
    assert trajectory.status is S.TRUNCATED_TIME
    assert len(trajectory.turns) == 1
    assert stage.envs[0].seen == []


@pytest.mark.parametrize("where", ["areset", "astep", "grade"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ZeroDivisionError("boom"), S.ENV_ERROR),
        (EnvError("boom"), S.ENV_ERROR),
        (SandboxError("boom"), S.INFRA_ERROR),
        (asyncio.CancelledError("boom"), S.ENV_ERROR),
    ],
)
async def test_whose_fault_it_is_decides_the_status(
    stage: Stage, task: Task, where: str, fault: BaseException, status: TrajectoryStatus
) -> None:
    trajectory = await stage.play(["5"], task, faults={where: fault})
    assert trajectory.status is status
    assert trajectory.reward is None
    assert trajectory.error is not None
    assert "Traceback" in trajectory.error
    assert stage.ended == [trajectory]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["areset", "astep", "grade"])
async def test_an_environment_that_hangs_ends_as_data(stage: Stage, task: Task, where: str) -> None:
    limits = QUICK.model_copy(update={"episode_s": 60.0})
    started_s = time.monotonic()
    trajectory = await stage.play(["5"], task, faults={where: hang}, limits=limits)
    assert time.monotonic() - started_s < 30
    assert trajectory.status is S.ENV_ERROR
    assert f"{where} did not end within" in str(trajectory.error)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"astep": StepResult(messages=())}, "without a reply"),
        ({"astep": StepResult(messages=(), terminated=True, reward=float("nan"))}, "reward nan"),
        ({"astep": "nonsense"}, "not a StepResult"),
        ({"astep": StepResult(messages=(), terminated=True, events={"seen": float("nan")})}, "events 'seen': nan"),
        ({"astep": StepResult(messages=(), terminated=True, events={"seen": "x"})}, "events 'seen': 'x'"),  # type: ignore[dict-item]
        ({"astep": StepResult(messages=(), terminated=True, events={"seen": -1})}, "events 'seen': -1"),
        ({"astep": StepResult(messages=(), terminated=True, events={"\ud800": 1})}, r"events '\ud800': 1"),
        ({"grade": Grade(reward=float("inf"))}, "reward inf"),
        ({"grade": Grade(reward=-1e31)}, "reward -1e+31; a number from -1e+12 to 1e+12 is wanted"),
        ({"astep": StepResult(messages=(), terminated=True, reward=1e39)}, "reward 1e+39"),
        ({"grade": 3}, "not a Grade"),
        ({"grade": Grade(reward=1.0, parts={"style": float("nan")})}, "parts style nan"),
        ({"grade": Grade(reward=1.0, parts={"return": 1e200})}, "parts return 1e+200"),
        ({"astep": StepResult(messages=("text",))}, "a str as a message"),  # type: ignore[arg-type]
        ({"astep": SystemExit(1)}, "astep called sys.exit"),
        ({"areset": SystemExit(1)}, "areset called sys.exit"),
    ],
)
async def test_nonsense_from_an_environment_is_its_error(
    stage: Stage, task: Task, faults: dict[str, Any], reason: str
) -> None:
    trajectory = await stage.play(["5"], task, faults=faults)
    assert trajectory.status is S.ENV_ERROR
    assert reason in str(trajectory.error)


async def test_counts_of_an_environment_are_plain_numbers_whatever_library_counted(stage: Stage, task: Task) -> None:
    reply = StepResult(messages=(), terminated=True, events={"seen": np.int64(2), "won": True})  # type: ignore[dict-item]
    trajectory = await stage.play(["5"], task, faults={"astep": reply})
    assert json.dumps(dict(trajectory.events)) == '{"seen": 2, "won": 1}'


async def test_half_a_surrogate_pair_from_an_environment_is_replaced(stage: Stage, task: Task) -> None:
    reply = StepResult(messages=(Message(role="user", content="a\ud800b"),))
    trajectory = await stage.play(["5"], task, faults={"astep": reply}, max_turns=2)
    assert trajectory.status is S.TRUNCATED_TURNS
    assert trajectory.turns[0].observation[0].text == "a\N{REPLACEMENT CHARACTER}b"


async def test_a_flood_in_a_traceback_is_bounded(stage: Stage, task: Task) -> None:
    trajectory = await stage.play(["5"], task, faults={"astep": EnvError("x" * 1_000_000)})
    assert len(str(trajectory.error)) < 10_000


async def test_a_generator_that_fails_is_infrastructure(stage: Stage, task: Task) -> None:
    for error in (GeneratorError("gone"), ValueError("an id that the model does not know")):
        trajectory = await stage.play([ADD, error], task)
        assert trajectory.status is S.INFRA_ERROR
        assert len(trajectory.turns) == 1


@pytest.mark.slow
async def test_a_generator_that_hangs_ends_at_its_deadline(stage: Stage, task: Task) -> None:
    trajectory = await stage.play(["5"], task, delay_s=60.0, limits=QUICK.model_copy(update={"generation_s": 0.1}))
    assert trajectory.status is S.INFRA_ERROR
    assert "generation did not end within" in str(trajectory.error)


async def test_a_cancelled_episode_is_recorded_and_the_cancellation_goes_on(stage: Stage, task: Task) -> None:
    playing = asyncio.create_task(stage.play([ADD, "5"], task, delay_s=0.3))
    await asyncio.sleep(0.4)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    (record,) = stage.ended
    assert record.status is S.CANCELLED
    assert record.reward is None
    assert len(record.turns) == 1


async def test_a_group_holds_one_trajectory_per_member_in_order(stage: Stage, task: Task) -> None:
    group = await stage.group(stage.agent(["5"]), task, size=5, num_slots=2)
    assert [each.member for each in group.trajectories] == [0, 1, 2, 3, 4]
    assert all(each.status is S.COMPLETED and each.group_id == "g" for each in group.trajectories)
    assert len(stage.envs) == 2
    assert sum(env.counts["reset"] for env in stage.envs) == 5
    assert all(request["min"] == 3 for request in stage.generator.requests)


async def test_one_member_s_failure_is_its_own(stage: Stage, task: Task) -> None:
    def make(number: int) -> Any:
        return stage.env_type(limits=QUICK, faults={"astep": RuntimeError("boom")} if number == 1 else {})

    group = await stage.group(stage.agent(["5"]), task, size=3, make=make)
    assert Counter(each.status for each in group.trajectories) == {S.COMPLETED: 2, S.ENV_ERROR: 1}
    assert stage.envs[1].is_closed
    assert len(stage.ended) == 3


async def test_infrastructure_errors_are_tried_again_on_a_fresh_environment(stage: Stage, task: Task) -> None:
    def make(number: int) -> Any:
        return stage.env_type(limits=QUICK, faults={"areset": SandboxError("lost")} if number == 0 else {})

    group = await stage.group(stage.agent(["5"]), task, size=1, make=make)
    (kept,) = group.trajectories
    assert (kept.status, kept.attempt, kept.trajectory_id) == (S.COMPLETED, 1, "g-0-1")
    assert [each.status for each in stage.ended] == [S.INFRA_ERROR, S.COMPLETED]
    assert len(stage.envs) == 2


async def test_past_the_attempts_an_infrastructure_error_stays(stage: Stage, task: Task) -> None:
    group = await stage.group(stage.agent([GeneratorError("gone")]), task, size=2, max_attempts=2)
    assert [each.status for each in group.trajectories] == [S.INFRA_ERROR, S.INFRA_ERROR]
    assert [each.attempt for each in group.trajectories] == [1, 1]
    assert len(stage.started) == len(stage.ended) == 4


async def test_an_environment_that_cannot_be_made_is_data(stage: Stage, task: Task) -> None:
    def make(number: int) -> Any:
        return [SandboxError("no engine"), ImportError("no module"), stage.env_type(limits=QUICK)][min(number, 2)]

    group = await stage.group(stage.agent(["5"]), task, size=3, make=make)
    assert Counter(each.status for each in group.trajectories) == {S.COMPLETED: 2, S.ENV_ERROR: 1}
    assert Counter(each.status for each in stage.ended)[S.INFRA_ERROR] == 1


async def test_a_cancelled_group_cancels_and_records_all_members(stage: Stage, task: Task) -> None:
    playing = asyncio.create_task(stage.group(stage.agent(["5"], delay_s=30.0), task, size=4))
    await asyncio.sleep(0.2)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert [each.status for each in stage.ended] == [S.CANCELLED] * 4
    assert all(env.is_closed for env in stage.envs)


async def test_worked_examples_stand_in_the_prompt_and_are_not_sampled(stage: Stage, task: Task) -> None:
    group = await stage.group(stage.agent([ADD, "5"] * 2), task, size=2, num_slots=1, demonstrations_in_prompt=2)
    first, second = group.trajectories
    assert first.turns[0].new_prompt_token_ids.tolist() == second.turns[0].new_prompt_token_ids.tolist()
    prompt = first.turns[0].new_prompt_token_ids.tolist()
    call_open = stage.encode("<tool_call>")[0]
    assert prompt.count(call_open) == 2
    plain = stage.compact.first_prompt([Message(role="user", content="add 4 and 1")], stage.envs[0].tools)
    assert prompt[-8:] == plain[-8:]
    num_scripted = sum(len(stage.encode(text)) + 1 for text in (ADD, "5"))
    for trajectory in group.trajectories:
        assert trajectory.num_sampled_tokens == num_scripted
        for turn in trajectory.turns:
            assert np.all(turn.completion.logprobs == -0.5)


async def test_the_task_s_own_prompt_is_used_where_the_environment_gives_none(stage: Stage, task: Task) -> None:
    prompt = (Message(role="user", content="sit"),)
    silent = type("Silent", (stage.env_type,), {"areset": _silent_reset})
    stage.env_type = silent
    trajectory = await stage.play(["5"], replace(task, prompt=prompt))
    assert trajectory.turns[0].new_prompt_token_ids.tolist() == stage.compact.first_prompt(prompt, silent().tools)
    nothing = await stage.play(["5"], task)
    assert nothing.status is S.ENV_ERROR


async def _silent_reset(self: Any, *, seed: int | None = None, options: Any = None) -> Any:
    from driftgym.envs.base import ResetResult

    self.seen = []
    return ResetResult(messages=())


def test_hooks_default_to_nothing() -> None:
    options = EpisodeOptions(limits=Limits(), config=RolloutConfig())
    call: Callable[[str], None] = options.on_started
    call("g-0-0")
