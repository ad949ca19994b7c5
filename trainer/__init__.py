"""Turns trajectories into weights."""
