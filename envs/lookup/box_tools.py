"""The tool process in the box: answers each line of JSON with one line. Standard library only, Python 3.8 and later.

A request is `{"id": n, "do": "load", "records": {...}}` or `{"id": n, "do": "call", "tool": name, "arguments": {...},
"sleep_s": s, "fault": name or null}`. A reply is `n KIND TEXT`: KIND is R (the result), P (a mistake of the agent's)
or E (the tool's own code failed, with its traceback), and TEXT is the inside of a JSON string, so that a reply that
was cut is still known by its number and readable up to the cut.
"""

from __future__ import annotations

import json
import sys
import time

FLOOD_BYTES = 100_000_000


class AgentError(Exception):
    """The arguments make no sense: a mistake of the agent's."""


class Store:
    """The records of one episode, and the tools that read them."""

    def __init__(self) -> None:
        """No records."""
        self._records: dict[str, dict[str, int]] = {}

    def load(self, records: dict[str, dict[str, int]]) -> str:
        """Takes `records` in the place of all that it held."""
        self._records = records
        return "loaded"

    def call(self, tool: str, arguments: dict[str, object]) -> str:
        """The result of a tool."""
        what = tool[len("get_") :]
        if what in ("oldest", "youngest"):
            persons = list(arguments["persons"])  # type: ignore[call-overload]
            choose = max if what == "oldest" else min
            return str(choose(persons, key=lambda person: self._person(person)["age"]))
        return str(self._person(arguments["person"])[what])

    def _person(self, person: object) -> dict[str, int]:
        if person not in self._records:
            raise AgentError(f"no such person: {str(person)[:40]}")
        return self._records[person]


def fail_as_told(fault: str | None) -> None:
    """Does what a broken tool does: waits for ever, or raises."""
    if fault == "hang":
        while True:
            time.sleep(60)
    if fault == "raise":
        raise RuntimeError("this tool is broken")


def flood(number: int) -> None:
    """Answers with a line of 100 MB."""
    sys.stdout.write(f"{number} R ")
    block = "x" * 100_000
    for _ in range(FLOOD_BYTES // len(block)):
        sys.stdout.write(block)
    sys.stdout.write("\n")
    sys.stdout.flush()


def answer(store: Store, request: dict) -> tuple[str, str]:  # type: ignore[type-arg]
    """The kind and the text of the reply to `request`."""
    try:
        if request["do"] == "load":
            return "R", store.load(request["records"])
        fail_as_told(request["fault"])
        return "R", store.call(request["tool"], request["arguments"])
    except AgentError as error:
        return "P", str(error)
    except Exception:
        import traceback  # dear, and hardly ever needed

        return "E", traceback.format_exc()


def reply(number: int, kind: str, text: str) -> str:
    """The line that answers the request of that number, without its end."""
    return f"{number} {kind} {json.dumps(text)[1:-1]}"


def main() -> None:
    """Answers requests until standard input ends."""
    store = Store()
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("sleep_s"):
            time.sleep(request["sleep_s"])
        if request.get("fault") == "flood":
            flood(request["id"])
            continue
        sys.stdout.write(reply(request["id"], *answer(store, request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
