"""How bytes move: buffers, queues, threads. Knows offsets and memory, not tensors; never syncs."""
