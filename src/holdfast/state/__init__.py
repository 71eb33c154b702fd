"""What the training state is: names, shapes, regions, progress. No files, no network."""
