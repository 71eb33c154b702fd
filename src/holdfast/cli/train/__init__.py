"""``holdfast train``: a language model trained on text, out of core."""
