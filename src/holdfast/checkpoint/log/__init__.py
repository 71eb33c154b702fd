"""The way of a completed step to a durable log record."""
