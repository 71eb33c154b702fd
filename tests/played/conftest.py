"""Where CUDA is, no other device can be played in the same process: there ``tests/gpu`` runs on the real one."""

import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
