"""The run directory and its durability: the only room that syncs, renames and unlinks."""
