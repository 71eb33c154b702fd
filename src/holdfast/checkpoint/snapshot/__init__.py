"""Snapshots: commits of the whole state, written beside training."""
