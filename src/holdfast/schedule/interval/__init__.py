"""How often to write a snapshot, from measured costs and failures."""
