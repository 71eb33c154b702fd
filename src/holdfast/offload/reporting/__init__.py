"""Reports of the engine on its steps."""
