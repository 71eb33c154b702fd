"""From a completed step to a durable log record."""
