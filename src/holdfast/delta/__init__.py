"""Survives: every optimizer step recorded as it is consumed, and replayed as it was."""
