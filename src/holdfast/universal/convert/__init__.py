"""The formats: one reader each, of what the format says, as a ``Source``."""
