"""The reference decoder, and pretrained folders with their tokenizers."""
