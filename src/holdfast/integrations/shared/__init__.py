"""The common needs of several integrations: positions in a loader, attributes that change, commits of all ranks."""
