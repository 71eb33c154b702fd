"""Files of ``torch.save``, read without running their pickles and written in a stream."""
