"""Out-of-core training: the state lives on the SSD, and the engine runs the operation lists that ``plan`` writes."""
