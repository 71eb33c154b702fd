"""Watching a run: what a person sees of the events."""
