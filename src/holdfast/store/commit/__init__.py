"""Commits: how they are written, retained and pruned."""
