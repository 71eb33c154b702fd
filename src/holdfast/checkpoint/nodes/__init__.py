"""Runs without a shared directory: each node keeps its ranks' shares on its own disk, and a copy at a partner."""
