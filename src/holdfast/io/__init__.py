"""The movement of bytes: buffers, queues, threads. Knows offsets and memory, not tensors; never syncs."""
