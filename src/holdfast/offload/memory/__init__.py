"""What of the state is in memory, and where."""
