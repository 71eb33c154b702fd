"""The readers of Megatron's distributed checkpoints (``torch_dist``, ``fsdp_dtensor``), in place."""
