"""States written under any parallelism, by this library or by another, read under any other."""
