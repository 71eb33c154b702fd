"""The state of a live DeepSpeed engine in this library's terms: names, regions, and held elements.

A rank's parts of parameters, and of their optimizer state, are views of its flat partitions. They appear as the
parameters and the state of an optimizer of torch, so matching, reading and writing are the same as for any model. What
was restored into that optimizer's state is then copied to DeepSpeed's. Torch's own optimizers stand for themselves.
DeepSpeed's Adams appear as torch's: they keep the same tensors, but their step counts are plain numbers, and decoupled
weight decay is a setting of the optimizer. An engine whose whole state is not known is refused. Called by
``integrations.deepspeed``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, ModelNotSupported, OptimizerNotSupported, RunMismatch
from ..formats.entry_matching import Match
from ..formats.restore import read_tensors
from ..formats.source import Source
from ..optim.kinds import ELEMENTWISE, is_elementwise
from ..state.capture import Captured, CapturedParameter, capture
from ..state.encoding import decode
from ..state.layout.regions import Region
from ..state.layout.zero import BY_PARAMETER, FLAT_GROUPS, Partition, PartitionMember, partitions_of
from ..state.live_state import LiveState, counts_on_host
from ..state.plain_tensors import FROM_NAME

Numbers = dict[str, Any]
"""Values that an optimizer holds for a whole partition, such as a step count, by slot."""
COUNTS = ("step", "mu_product", "eta", "mu")
"""Slots of torch's optimizers that are one number, also for a parameter of one element."""


@dataclass(frozen=True, eq=False)
class ShownState:
    """The ``state`` of ``engine`` on this rank, and the ``partitions`` that its tensors are views of.

    ``name_of`` has the names of its own parameters, by id.
    """

    engine: Any
    state: LiveState
    partitions: Sequence[Partition]
    name_of: Mapping[int, str]

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer that updates the partitions."""
        return self.engine.optimizer.optimizer

    @property
    def beside(self) -> torch.optim.Optimizer:
        """The optimizer that stands for ``base``, over the parameters of ``state``."""
        return self.state.optimizers[0]

    def names(self, partition: Partition) -> list[tuple[str, PartitionMember]]:
        """Return the members of a partition, each with its name."""
        return [(self.name_of[id(member.parameter)], member) for member in partition.members]


def show(engine: Any, version: str) -> ShownState:
    """Return the state of ``engine``. Raises ``BadInput`` and related errors if its objects do not reveal the state."""
    refuse(engine)
    optimizer = engine.optimizer
    partitions = partitions_of(optimizer, engine.module, version)
    places = {id(member.parameter): (each, member) for each in partitions for member in each.members}
    captured = capture(engine.module)
    shown = tuple(_shown(each, places.get(id(each.parameter))) for each in captured.parameters)
    trained = [each for each in shown if each.group is not None]
    beside = optimizer_beside(optimizer.optimizer, trained)
    captures = [Captured(shown, captured.buffers, captured.absent)]
    name_of = {id(each.parameter): each.name for each in captured.parameters}
    return ShownState(engine, LiveState(engine.module, [beside], captures=captures), partitions, name_of)


@torch.no_grad()
def put_back(shown: ShownState, numbers: Sequence[Numbers], found: Match) -> None:
    """Copy state and hyper-parameters from the optimizer beside DeepSpeed's to DeepSpeed's own."""
    put_hyper_parameters(shown.base, shown.beside)
    for partition, counts in zip(shown.partitions, numbers, strict=True):
        if partition.group is None:
            continue
        made = {
            slot: number_for(shown.base, slot, value, partition.group, partition.master)
            for slot, value in counts.items()
        }
        made |= _joined(shown, partition, found, made.keys())
        shown.base.state.pop(partition.master, None)
        if made:
            shown.base.state[partition.master] = made
    if hasattr(shown.engine.optimizer, "_hp_optimizer_states_linked"):
        shown.engine.optimizer._hp_optimizer_states_linked = False


@torch.no_grad()
def refresh(shown: ShownState) -> None:
    """Copy the partitions to the model on all ranks. Collective: every rank must call this."""
    optimizer = shown.engine.optimizer
    if type(optimizer).__name__ != BY_PARAMETER:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for partition in shown.partitions:
        partition.working.copy_(partition.master)
    optimizer.checkpoint_event_epilogue()


def refuse(engine: Any) -> None:
    """Raise ``BadInput`` and related errors, with the way out, for an engine whose whole state is not known."""
    if not hasattr(engine, "zero_optimization_stage") or not hasattr(engine, "module"):
        raise BadInput(
            f"{type(engine).__name__} is no engine of DeepSpeed: give what deepspeed.initialize returned"
        )
    if getattr(engine, "_deepcompile_active", False):
        raise _refused("it is compiled by DeepCompile, which moves parameters", "Compile without it.")
    if getattr(engine, "pipeline_parallelism", False):
        raise _refused("it is a pipeline engine, whose ranks hold different layers")
    if not engine.zero_optimization_stage():
        raise ModelNotSupported(
            "the engine has ZeRO off (stage 0), so nothing is divided. Give zero_optimization a stage of 1, 2 or 3, or"
            " train with a holdfast.Checkpointer, which takes the same sources."
        )
    if engine.has_moe_layers:
        raise _refused("it has layers of experts, whose ranks are others than those of the rest")
    if engine.mp_world_size > 1 or (getattr(engine, "autotp_size", int)() or 0) > 1:
        raise _refused("it is tensor parallel, and its objects do not tell how tensors are cut")
    if _holds_gradients(engine):
        raise BadInput(
            "gradients are being accumulated, and are no part of the state. Call this after the engine.step() that"
            " updates the parameters."
        )
    _refuse_optimizer(engine.optimizer)


def numbers_of(shown: ShownState, source: Source, found: Match) -> list[Numbers]:
    """Return, by partition, the values of the match that are held once for the whole partition.

    Raises ``RunMismatch`` unless its members have equal values in equal slots: a flat tensor has one step count.
    """
    return [
        {} if partition.group is None else _numbers_in(shown.names(partition), source, found)
        for partition in shown.partitions
    ]


def _shown(captured: CapturedParameter, place: tuple[Partition, PartitionMember] | None) -> CapturedParameter:
    """Return ``captured`` with this rank's part as the parameter."""
    if place is None:
        whole = nn.Parameter(captured.parameter.detach(), requires_grad=False)
        return CapturedParameter(captured.names, whole, None, False)
    partition, member = place
    held = partition.master.detach().narrow(0, member.offset, member.stretch.elements)
    trained = partition.group is not None
    parameter = nn.Parameter(held, requires_grad=trained)
    return CapturedParameter(captured.names, parameter, partition.group, trained, member.stretch)


def _holds_gradients(engine: Any) -> bool:
    """Return whether there are gradients that no step has consumed, as far as the engine knows."""
    averaged = getattr(engine.optimizer, "averaged_gradients", {})
    if any(each is not None for each in averaged.values()) or getattr(engine, "_unmanaged_backward_count", 0):
        return True
    told = getattr(
        engine, "_is_gradient_accumulation_boundary", None
    )  # set by a library that counts, such as accelerate
    if told is not None:
        return not told
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return is_managed and engine.micro_steps % engine.gradient_accumulation_steps() > 0


def _refuse_optimizer(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if kind not in (BY_PARAMETER, *FLAT_GROUPS):
        raise _refused(f"its optimizer is {kind}, whose partitions are not known")
    offloads = ("zenflow", "cpu_offload", "offload_optimizer", "offload_param", "swap_optimizer")
    if away := next((name for name in offloads if getattr(optimizer, name, False)), None):
        raise _refused(
            f"its state is offloaded ({away}), where it is not always in place",
            "Leave out offload_optimizer and offload_param; holdfast.offload trains out of core, from any source.",
        )
    if getattr(optimizer, "offloaded_states", None):
        raise BadInput("its states are offloaded at the moment. Call engine.reload_states() first.")
    if getattr(optimizer, "zero_hpz_partition_size", 1) > 1:
        raise _refused("it keeps second copies of parts (zero_hpz_partition_size)", "Leave that out.")
    if getattr(optimizer, "zero_quantized_nontrainable_weights", False):
        raise _refused(
            "its frozen parameters are quantized (zero_quantized_nontrainable_weights)", "Leave that out."
        )
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        raise _refused("it scales the loss by torch's own GradScaler (torch_autocast in fp16)", "Use bf16.")
    if getattr(optimizer, "master_weights_and_grads_dtype", torch.float32) != torch.float32:
        raise _refused(
            "its master weights are of 16 bits", "Leave out fp16_master_weights_and_grads and its like."
        )
    refuse_unknown(optimizer.optimizer)


def _refused(why: str, instead: str = "") -> ModelNotSupported:
    instead = instead or (
        "Load with engine.load_checkpoint; `holdfast convert SRC FOLDER --to deepspeed --stage N` writes the universal"
        " folder that it takes, from any source."
    )
    return ModelNotSupported(f"the engine's state cannot be told from its objects: {why}. {instead}")


def _numbers_in(members: Sequence[tuple[str, PartitionMember]], source: Source, found: Match) -> Numbers:
    first: tuple[str, Collection[str], Numbers] | None = None
    for name, member in members:
        slots = {slot: each for slot, each in found.found.get(name, {}).items() if slot != "param"}
        values = {slot: decode(value) for slot, value in found.values.get(name, {}).items()}
        if not slots and not values:
            continue
        single = [
            slot for slot, each in slots.items()
            if not each.atom.shape and (member.stretch.whole or slot in COUNTS)
        ]  # fmt: skip
        read = read_tensors(source, [(slots[slot], Region.whole(())) for slot in single])
        numbers = {**values, **dict(zip(single, read, strict=True))}
        kinds = {f"{slot} of {_dtype_held(found, name, slot)}" for slot in slots.keys() - set(single)}
        if first is None:
            first = name, kinds, numbers
        _refuse_unlike(first, (name, kinds, numbers))
    return {} if first is None else first[2]


def _dtype_held(found: Match, name: str, slot: str) -> str:
    """Return the dtype to hold a slot in: fp32 as the master, where parameter and slot are cast; else the source's."""
    there = found.found[name]
    cast = name in found.cast and there[slot].atom.dtype == there["param"].atom.dtype
    return "F32" if cast else there[slot].atom.dtype


def _refuse_unlike(
    one: tuple[str, Collection[str], Numbers], other: tuple[str, Collection[str], Numbers]
) -> None:
    (first, kinds, numbers), (name, others, own) = one, other
    odd = next((slot for slot in numbers.keys() | own.keys() if not _same(numbers, own, slot)), None)
    if odd is None and kinds == others:
        return
    told = (
        f"{odd} is {_told(numbers, odd)} of {first} and {_told(own, odd)} of {name}"
        if odd is not None
        else f"of {first} there is {', '.join(sorted(kinds))}, and of {name} {', '.join(sorted(others))}"
    )
    raise RunMismatch(
        f"{told}. DeepSpeed joins them to one flat tensor, of which its optimizer keeps one: give the optimizer a group"
        " of parameters for each, or begin its state anew from the weights alone (a Hugging Face folder)."
    )


def _same(one: Mapping[str, Any], other: Mapping[str, Any], slot: str) -> bool:
    if slot not in one or slot not in other:
        return False
    a, b = torch.as_tensor(one[slot]), torch.as_tensor(other[slot])
    return a.dtype == b.dtype and torch.equal(a, b)


def _told(numbers: Mapping[str, Any], slot: str) -> str:
    value = numbers.get(slot)
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def _joined(
    shown: ShownState, partition: Partition, found: Match, numbers: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return a flat tensor of the members' state for each slot, with zeros elsewhere. Releases the members' tensors."""
    members = shown.names(partition)
    held = [shown.beside.state.pop(shown.state.parameter(name).parameter, {}) for name, _ in members]
    there = {
        slot: FROM_NAME[_dtype_held(found, name, slot)]
        for name, _ in members
        for slot in found.found.get(name, {})
        if slot != "param" and slot not in numbers
    }
    there |= {slot: piece.dtype for each in held for slot, piece in each.items() if slot in there}
    if is_deepspeeds(shown.base):
        there = dict.fromkeys(there, partition.master.dtype)  # its kernels assume that dtype
    made = {slot: torch.zeros_like(partition.master, dtype=dtype) for slot, dtype in there.items()}
    for (_, member), each in zip(members, held, strict=True):
        for slot in there.keys() & each.keys():
            place = made[slot].narrow(0, member.offset, member.stretch.elements)
            place.copy_(each.pop(slot).reshape(-1))
    return made


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


def unsupported_messages(base: Any, beside: torch.optim.Optimizer) -> list[str]:
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
