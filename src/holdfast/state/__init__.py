"""The content of the training state: names, shapes, regions, progress. No files, no network."""
