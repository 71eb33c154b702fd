"""Trainers of other libraries whose optimizer steps the out-of-core engine does."""
