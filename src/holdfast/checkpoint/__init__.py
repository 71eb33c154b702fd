"""Durability of training in memory: every optimizer step is recorded as it is consumed, and replayed as it was."""
