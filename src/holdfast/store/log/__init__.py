"""The log of a rank: append-only segments of records, and their chain to a step."""
