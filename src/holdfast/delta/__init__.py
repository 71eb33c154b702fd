"""Survives: every optimizer step is recorded as it is consumed, and replayed as it was."""
