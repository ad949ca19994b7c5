"""The child process of `ProcessEnv`. What it sends is defined elsewhere: this module is its `__main__`."""

import contextlib

from driftgym.envs.adapters.play import Player
from driftgym.processes import serve_calls


def main() -> None:
    """Answers the parent's calls until it is gone."""
    player = Player()
    serve_calls({"make": player.make, "reset": player.reset, "step": player.step, "close": player.close})
    with contextlib.suppress(Exception):
        player.close()


if __name__ == "__main__":
    main()
