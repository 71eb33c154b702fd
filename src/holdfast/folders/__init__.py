"""Pretrained models: folders in the format of Hugging Face's libraries, streamed in and written back."""
