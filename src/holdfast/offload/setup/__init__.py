"""The way from a model and an optimizer to an engine: checks, placement, first or resumed state."""
