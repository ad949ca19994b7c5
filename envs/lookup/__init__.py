"""`driftgym/Lookup-v0`: asked for a fact about a person, the agent calls the right one of several similar tools."""
