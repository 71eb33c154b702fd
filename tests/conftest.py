"""Every test computes on one thread: small operations on more of them are many times slower when cores are
shared, and some sums come out in another order."""

import torch

torch.set_num_threads(1)
