"""Rules that describe a layout which nobody recorded."""
