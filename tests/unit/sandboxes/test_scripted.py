"""The fake twin: handlers for commands and processes."""

import asyncio

import pytest

from driftgym.errors import SandboxError
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.scripted import Outcome, ProcessExitError, ScriptedCall, ScriptedProvider, ScriptedSandbox


async def test_handlers_see_the_call_and_change_files() -> None:
    async def compile_it(call: ScriptedCall) -> Outcome:
        call.files["/work/out"] = call.files["/work/in"].upper()
        return Outcome(stdout=call.cwd.encode(), stderr=call.env["MODE"].encode(), exit_code=2)

    box = ScriptedSandbox(commands={"make all": compile_it})
    await box.write_file("in", b"text")
    result = await box.exec("make all", cwd="sub", env={"MODE": "fast"})
    assert (result.exit_code, result.stdout, result.stderr) == (2, "/work/sub", "fast")
    assert await box.read_file("/work/out") == b"TEXT"


async def test_processes_may_end_hang_and_raise() -> None:
    async def tool(line: str) -> str:
        if line == "exit":
            raise ProcessExitError
        if line == "hang":
            await asyncio.sleep(60)
        return line * 2

    provider = ScriptedProvider(processes={"tool": tool})
    box = await provider.start(SandboxSpec(), timeout_s=1)
    process = await box.spawn(["tool"])
    assert (await process.ask("ab", timeout_s=1)).text == "abab"
    with pytest.raises(TimeoutError):
        await process.ask("hang", timeout_s=0.05)
    assert not process.is_alive
    process = await box.spawn(["tool"])
    with pytest.raises(SandboxError):
        await process.ask("exit", timeout_s=1)
    assert not process.is_alive
    await provider.close()


async def test_empty_argv_starts_nothing() -> None:
    box = ScriptedSandbox()
    assert (await box.exec([])).exit_code == 127
    with pytest.raises(SandboxError):
        await box.spawn([])


async def test_error_of_a_handler_is_not_hidden() -> None:
    def broken(call: ScriptedCall) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ScriptedSandbox(commands={"x": broken}).exec(["x"])
