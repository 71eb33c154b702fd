"""The schedules: numbers in, lists of operations out. No torch, no files."""
