"""Pretrained models: folders as Hugging Face's libraries keep them, streamed in and given back."""
