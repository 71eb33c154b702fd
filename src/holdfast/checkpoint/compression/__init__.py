"""Codecs of gradients, exact and lossy."""
