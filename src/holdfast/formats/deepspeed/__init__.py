"""The readers of ZeRO-1, 2 and 3 checkpoints of DeepSpeed, in place, and reader and writer of universal folders."""
