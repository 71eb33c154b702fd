"""Adapters: durable training with other libraries. Import each adapter by its own name."""
