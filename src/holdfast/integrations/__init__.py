"""Durable training with other libraries. Import each integration by its own name."""
