"""Views of a run that are drawn from its events."""
