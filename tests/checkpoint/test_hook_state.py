"""Communication hooks of a script's own, whose state is in no commit."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from torch import nn

from holdfast.checkpoint.compression.comm_hook import HookState, warn_of_hook_state
from holdfast.checkpoint.compression.lossy import TopK


class Wrapped(nn.parallel.DistributedDataParallel):
    """As one that was wrapped, without a process group."""

    def __init__(self, *states):
        nn.Module.__init__(self)
        self._comm_hooks = [(None, state) for state in states]


def test_a_hook_with_state_is_told():
    with pytest.warns(UserWarning, match=r"hook has a SimpleNamespace, and no commit holds it"):
        warn_of_hook_state(Wrapped(SimpleNamespace(error_dict={})))


@pytest.mark.parametrize("states", [[], [None], [HookState(TopK(), None)]])
def test_a_hook_without_state_of_its_own_is_not(states):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_hook_state(Wrapped(*states))
