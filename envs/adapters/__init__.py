"""Environments of other makes, as a `ToolEnv`."""
