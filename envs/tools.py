"""Tools: their schemas, the checking of arguments, and the running of one call under its deadline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool as the model is told of it.

    >>> ToolSchema(name="get_age", description="Age in years.", parameters={"type": "object"}).name
    'get_age'
    """

    name: str
    """Unique within the environment."""
    description: str
    """One sentence for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments; an object."""
