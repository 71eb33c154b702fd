"""Text for the main job, and loaders whose position survives any change of batch or world size."""
