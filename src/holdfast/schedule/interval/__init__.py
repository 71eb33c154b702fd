"""The interval of snapshots, from measured costs and failures."""
