"""The movement of bytes: buffers, queues and threads, which know offsets and memory, not tensors, and never sync."""
