"""The script's end of ``holdfast drill`` and ``holdfast standby``: what its process does when they started it."""
