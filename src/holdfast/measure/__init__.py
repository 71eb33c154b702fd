"""The rates that this machine attains, measured with the parts that a run uses. Rates are per second."""
