"""The state in memory: buffers, residents, and what is on the device."""
