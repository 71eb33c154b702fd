"""The optimizers that update the partitions of a live DeepSpeed engine, and as which of torch's each is shown.

Torch's own are shown as what they are. DeepSpeed's Adams are shown as torch's: they keep the same tensors, but their
counts of steps are plain numbers, and whether weight decay is decoupled is theirs and not their groups'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OptimizerNotSupported
from ..state.capture import CapturedParameter
from ..state.live import counts_on_host
from ..update.kinds import ELEMENTWISE, is_elementwise

ADAMS = {
    ("deepspeed.ops.adam.fused_adam", "FusedAdam"),
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
}
"""DeepSpeed's own, by module and class."""

REMADE = torch.optim.Adagrad
"""DeepSpeed 0.19.8 makes it anew, with the hyper-parameters of its constructor for all groups."""


def is_deepspeeds(base: torch.optim.Optimizer) -> bool:
    """Whether ``base`` is an Adam of DeepSpeed."""
    return (type(base).__module__, type(base).__qualname__) in ADAMS


def refuse_unknown(base: torch.optim.Optimizer) -> None:
    """Raise ``OptimizerNotSupported`` unless what ``base`` keeps is known."""
    if is_deepspeeds(base) or (is_elementwise(base) and not isinstance(base, REMADE)):
        return
    known = ", ".join(name for name in ELEMENTWISE if name != "Adagrad")
    raise OptimizerNotSupported(
        f"the optimizer in the engine is {type(base).__name__}, and what it keeps is known of {known} of torch.optim,"
        " and of FusedAdam and DeepSpeedCPUAdam of DeepSpeed. Give deepspeed.initialize one of these."
    )


def optimizer_beside(base: torch.optim.Optimizer, trained: Sequence[CapturedParameter]) -> Any:
    """What ``base`` is shown as, of the parameters ``trained``, without state; made as ``copy.deepcopy`` makes one."""
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
        group.pop("amsgrad")  # which these do not do, so that nothing here wants what it keeps
    return made


def _adam_of(base: Any) -> type[torch.optim.Optimizer]:
    return torch.optim.AdamW if base.adam_w_mode else torch.optim.Adam


def shown_number(base: torch.optim.Optimizer, value: Any) -> Any:
    """What ``base`` holds once for a whole partition, as the optimizer that it is shown as has it."""
    if is_deepspeeds(base) and not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32)
    return value


def number_for(base: torch.optim.Optimizer, slot: str, value: Any, number: int, master: torch.Tensor) -> Any:
    """The ``value`` of a ``slot`` as ``base`` would have made it for a ``master`` of group ``number``, and where torch
    would: of each partition its own, as some updates count in place."""
    if is_deepspeeds(base):
        return int(value)
    if slot == "step" and not isinstance(value, torch.Tensor):  # of torch before 1.12
        value = torch.tensor(float(value), dtype=torch.float32)
    if not isinstance(value, torch.Tensor):
        return value
    on_host = slot == "step" and counts_on_host(base.param_groups[number])
    return value.to("cpu" if on_host else master.device, copy=True)


def put_hyper_parameters(base: torch.optim.Optimizer, beside: torch.optim.Optimizer) -> None:
    """Give the groups of ``base`` what those of ``beside`` have, but for what its class has not."""
    for group, own in zip(base.param_groups, beside.param_groups, strict=True):
        keys = own.keys() - {"params"}
        if is_deepspeeds(base):
            keys &= group.keys() - {"amsgrad"}
            group |= {"step": 0} if "step" in group else {}  # where FusedAdam counts from without state
        group.update({key: own[key] for key in keys})


def told_of_left(base: Any, beside: torch.optim.Optimizer) -> list[str]:
    """What an Adam of DeepSpeed does not take of the hyper-parameters that ``beside`` has now, for a person."""
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
