"""Durability: the only room that syncs, renames and unlinks."""
