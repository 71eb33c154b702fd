"""Copies of what an optimizer step consumes, and detection of changes that no step made."""
