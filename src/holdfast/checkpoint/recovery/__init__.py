"""Recovery: the state of a step, from a snapshot and log records."""
