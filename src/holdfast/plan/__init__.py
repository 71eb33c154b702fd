"""When things happen. Numbers in, lists of operations out: no torch, no files."""
