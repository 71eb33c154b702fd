"""Code that several integrations need: positions in a loader, attributes that change, commits of all ranks."""
