"""Out-of-core training: the state is on the SSD, and the engine runs operation lists that ``schedule`` writes."""
