"""The fake twin of the boxes of Lookup: the same tools, in memory and without a process."""

import asyncio
import json

from driftgym.envs.lookup.box_tools import FLOOD_BYTES, Store, answer, reply
from driftgym.sandboxes.base import SandboxSpec
from driftgym.sandboxes.scripted import LineHandler, ScriptedProvider, ScriptedSandbox


class ScriptedLookupProvider(ScriptedProvider):
    """Starts boxes in memory whose `python3` is the tool process of Lookup; each box has a store of its own."""

    async def start(self, spec: SandboxSpec, *, timeout_s: float) -> ScriptedSandbox:
        """A new box, at once."""
        self._processes = {"python3": _tool_process()}
        return await super().start(spec, timeout_s=timeout_s)


def _tool_process() -> LineHandler:
    store = Store()

    async def handle(line: str) -> str:
        request = json.loads(line)
        if request.get("sleep_s"):
            await asyncio.sleep(request["sleep_s"])
        fault = request.get("fault")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "flood":
            return f"{request['id']} R " + "x" * FLOOD_BYTES
        return reply(request["id"], *answer(store, request))

    return handle
