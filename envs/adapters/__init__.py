"""Foreign environments, played as `ToolEnv`s."""
