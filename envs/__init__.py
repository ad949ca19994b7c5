"""What a task is and what it is worth. Speaks messages, never a token id, a model or a container API.

Importing the package tells Gymnasium the ids of driftgym's environments, and imports none of them.
"""

from driftgym.envs.registry import register_envs

register_envs()
