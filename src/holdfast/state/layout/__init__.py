"""Regions of tensors, and how tensors are divided over ranks."""
