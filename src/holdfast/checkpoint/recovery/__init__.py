"""Recovery: from a snapshot and log records to the state of a step."""
