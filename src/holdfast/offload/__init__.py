"""Fits: training with the state on the SSD, in an order of operations that ``plan`` wrote."""
