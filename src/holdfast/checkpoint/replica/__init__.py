"""Replicas: processes that do every step as well and outlive the trainer."""
