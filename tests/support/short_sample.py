"""To be imported where ``holdfast train`` is to run: the text that it writes at its end has few tokens."""

from holdfast.cli.train import train_job

train_job.SAMPLE_TOKENS = 20
