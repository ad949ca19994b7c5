"""driftgym: an agentic RL gym.

Agents play multi-turn, tool-calling episodes in sandboxed Gymnasium environments; a pool of generators,
apart from the trainer, writes their tokens; an asynchronous trainer learns from trajectories that may be
many policy versions old. The lag is measured per token and tolerated, instead of fought by dropping slow
episodes.

The rooms, each importing only from those after it: `trainer`, `agents`, `envs`, `sandboxes`.
"""

__version__ = "0.1.0"
