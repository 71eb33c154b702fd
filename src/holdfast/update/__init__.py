"""The one host optimizer: tiles, hyper-parameter snapshots, replay of one step."""
