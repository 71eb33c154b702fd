"""Copies of a run in a bucket."""
