"""The verbs that start a user's script and watch over it: ``drill`` and ``standby``. No module here imports torch."""
