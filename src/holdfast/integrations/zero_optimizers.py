"""Optimizers that update the partitions of a live DeepSpeed engine, and the torch optimizer that stands for each.

Torch's own optimizers stand for themselves. DeepSpeed's Adams appear as torch's: they keep the same tensors, but their
step counts are plain numbers, and decoupled weight decay is a setting of the optimizer, not of its groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OptimizerNotSupported
from ..optim.kinds import ELEMENTWISE, is_elementwise
from ..state.capture import CapturedParameter
from ..state.live_state import counts_on_host

ADAMS = {
    ("deepspeed.ops.adam.fused_adam", "FusedAdam"),
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
}
"""DeepSpeed's own Adams, by module and class."""

REMADE = torch.optim.Adagrad
"""A class that DeepSpeed 0.19.8 rebuilds with its constructor's hyper-parameters for all groups."""


def is_deepspeeds(base: torch.optim.Optimizer) -> bool:
    """Return whether ``base`` is an Adam of DeepSpeed."""
    return (type(base).__module__, type(base).__qualname__) in ADAMS


def refuse_unknown(base: torch.optim.Optimizer) -> None:
    """Raise ``OptimizerNotSupported`` unless the state that ``base`` keeps is known."""
    if is_deepspeeds(base) or (is_elementwise(base) and not isinstance(base, REMADE)):
        return
    known = ", ".join(name for name in ELEMENTWISE if name != "Adagrad")
    raise OptimizerNotSupported(
        f"the optimizer in the engine is {type(base).__name__}, and what it keeps is known of {known} of torch.optim,"
        " and of FusedAdam and DeepSpeedCPUAdam of DeepSpeed. Give deepspeed.initialize one of these."
    )


def optimizer_beside(base: torch.optim.Optimizer, trained: Sequence[CapturedParameter]) -> Any:
    """Return the optimizer that stands for ``base`` over the parameters ``trained``, without state.

    It is built as ``copy.deepcopy`` builds one.
    """
    own = is_deepspeeds(base)
    kind = _adam_of(base) if own else type(base)
    made = kind.__new__(kind)
    groups = [
        {**group, "params": [each.parameter for each in trained if each.group == number]}
        for number, group in enumerate(base.param_groups)
    ]
    made.__setstate__({"defaults": base.defaults, "state": defaultdict(dict), "param_groups": groups})
    for group in groups if own else ():
        group.pop("step", None)
        group.pop("amsgrad")  # DeepSpeed's Adams lack it, and nothing here reads its tensors
    return made


def _adam_of(base: Any) -> type[torch.optim.Optimizer]:
    return torch.optim.AdamW if base.adam_w_mode else torch.optim.Adam


def shown_number(base: torch.optim.Optimizer, value: Any) -> Any:
    """Return a value that ``base`` holds for a whole partition, in the form of the optimizer that stands for it."""
    if is_deepspeeds(base) and not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32)
    return value


def number_for(base: torch.optim.Optimizer, slot: str, value: Any, number: int, master: torch.Tensor) -> Any:
    """Return ``value`` of ``slot`` as ``base`` would create it for a ``master`` of group ``number``, on torch's device.

    Each partition gets its own copy, because some updates count in place.
    """
    if is_deepspeeds(base):
        return int(value)
    if slot == "step" and not isinstance(value, torch.Tensor):  # torch before 1.12 wrote it
        value = torch.tensor(float(value), dtype=torch.float32)
    if not isinstance(value, torch.Tensor):
        return value
    on_host = slot == "step" and counts_on_host(base.param_groups[number])
    return value.to("cpu" if on_host else master.device, copy=True)


def put_hyper_parameters(base: torch.optim.Optimizer, beside: torch.optim.Optimizer) -> None:
    """Copy the hyper-parameters of ``beside`` to the groups of ``base``, except for those that its class lacks."""
    for group, own in zip(base.param_groups, beside.param_groups, strict=True):
        keys = own.keys() - {"params"}
        if is_deepspeeds(base):
            keys &= group.keys() - {"amsgrad"}
            group |= {"step": 0} if "step" in group else {}  # FusedAdam counts from here without state
        group.update({key: own[key] for key in keys})


def told_of_left(base: Any, beside: torch.optim.Optimizer) -> list[str]:
    """Return messages about hyper-parameters of ``beside`` that an Adam of DeepSpeed does not support."""
    if not is_deepspeeds(base):
        return []
    here = {"decoupled_weight_decay": bool(base.adam_w_mode), "amsgrad": False, "maximize": False}
    left = {
        f"{key}={group[key]}"
        for group in beside.param_groups
        for key, value in here.items()
        if group.get(key, value) != value
    }
    return [f"{type(base).__name__} goes on without its {', '.join(sorted(left))}"] if left else []
