"""What the engine reports of its steps."""
