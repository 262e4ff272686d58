"""Replays of traces through real proposers and a real planner."""
