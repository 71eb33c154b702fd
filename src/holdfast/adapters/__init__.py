"""Adapters: what other libraries train with, made durable. Each is imported by its own name."""
