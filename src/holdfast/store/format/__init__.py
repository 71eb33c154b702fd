"""The files of a run directory, byte by byte."""
