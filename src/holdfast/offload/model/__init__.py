"""The user's model as a sequence of blocks."""
