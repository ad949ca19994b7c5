"""Runs untrusted commands somewhere safe. Knows nothing of RL."""
