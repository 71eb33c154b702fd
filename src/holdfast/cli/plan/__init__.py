"""``plan``, ``simulate`` and ``probe``: questions to the planner."""
