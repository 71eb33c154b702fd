"""To be imported where ``holdfast train`` is to run: it writes one token at its end, and reads little held-out text."""

from holdfast.cli.train import train_job

train_job.SAMPLE_TOKENS, train_job.VALIDATION_SAMPLES = 1, 4
