"""The options of a ``Checkpointer``, and the checks that refuse bad ones before anything is written.

An error names the value and what is enough, so that a run never begins with options that it could not keep. Called by
``Checkpointer`` and its durability backends. Bytes, seconds.
"""

from __future__ import annotations

import inspect
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from ..distributed import Ranks, this_machine
from ..errors import BadInput
from ..io.threads import allowed_cpus, used_cpus
from ..measure.free_memory import free_host_bytes
from ..optim.kinds import is_elementwise
from ..quantities import GiB, format_bytes, parse_bytes
from ..schedule.interval.snapshot_interval import Limits
from ..state.capture import PipelineStages
from ..state.live_state import LiveState
from ..store.commit.retention import Keep, refuse_best, refuse_weights
from .capture.closures import refuse_closures
from .compression.codecs import Codec, Exact
from .grace import check_grace
from .log.recorder import BOUND
from .nodes.local_disks import LocalDisks
from .snapshot.snapshot_chunks import frozen_in, owned_by
from .snapshot.snapshot_scheduler import POLICIES

Exactness = Literal["state", "continuation", "approximate"]
"""The promises of a resume, as ``Checkpointer.resume`` describes them."""
HelperCpus = Sequence[int] | Literal["auto"] | None
"""The numbers of CPUs, "auto" to have spare ones found, or None to leave threads where they are."""

DEFAULT_MEMORY = 4 * GiB
"""The bytes for copies that wait to be written where no ``memory=`` is given."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that say how steps are kept. Raises ``BadInput`` for bad values."""

    codec: Codec
    keep: Keep
    base_every: int | None
    every: int | str = 1
    """Steps from one kept step to the next, or "auto"."""
    when_behind: str
    memory: int | str = DEFAULT_MEMORY
    """Bytes for copies that wait to be written."""
    has_given_memory: bool = True
    """True if the user gave ``memory``, which is then refused where the machine does not have it."""
    storage: int | str | None
    """Bytes of the disk, for the whole run."""
    recovery_seconds: float
    bandwidth_share: float
    deadline_seconds: float
    direct: bool
    bytes_per_step: int
    """Bytes of a snapshot that are copied at the end of one step."""
    wait_each_step: bool = False
    """True if ``step`` returns only when its step is durable."""
    grace_seconds: float | None = None
    """Seconds from a SIGTERM to the end of the process; None for no bound."""
    mean_seconds_between_failures: float | None = None
    """The time between failures that the user expects; None to estimate it from restarts."""
    helper_cpus: tuple[int, ...] = ()
    """CPUs of the threads that write beside training; none leaves them where they are."""
    has_replica: bool = False
    """True if a replica keeps the steps, and not log records."""

    def __post_init__(self) -> None:
        _refuse_bad(self.base_every, self.when_behind, self.keep, self.codec)
        _refuse_bad_every(self)
        _refuse_bad_failures(self)
        check_grace(self.grace_seconds, self.has_replica)
        _ = self.limits

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def storage_bytes(self) -> int | None:
        return parse_bytes(self.storage) if isinstance(self.storage, str) else self.storage

    @property
    def staging_bytes(self) -> int:
        """Bytes of the memory that copies of a snapshot may take.

        All of it where there are no records, half where a whole snapshot may have to be copied beside records.
        """
        if self.told_every is None:
            return max(self.memory_bytes // 2, self.bytes_per_step)
        return self.memory_bytes if self.told_every > 1 else max(self.memory_bytes // 4, self.bytes_per_step)

    @property
    def told_every(self) -> int | None:
        """``every`` as a number; None where it is to be chosen."""
        return None if isinstance(self.every, str) else self.every

    @property
    def limits(self) -> Limits:
        """The limits of the snapshot interval. Raises ``BadInput`` for bad values."""
        try:
            return Limits(
                recovery_seconds=self.recovery_seconds, storage_bytes=self.storage_bytes, host_bytes=self.memory_bytes,
                bandwidth_share=self.bandwidth_share, retain=self.keep.last,
            )  # fmt: skip
        except ValueError as error:
            raise BadInput(str(error)) from error

    def slots_that_fit(self, slot_bytes: int) -> int:
        """Return the number of staging buffers: one for each step in flight, at least two where memory is short.

        Raises ``BadInput`` where two do not fit, with the memory that is enough. A quarter of the memory, or
        ``bytes_per_step`` if that is more, is reserved for snapshots; half with ``every="auto"``. Without records there
        is none.
        """
        if self.told_every not in (None, 1):
            return 0
        room = self.memory_bytes - self.staging_bytes
        if room < 2 * slot_bytes:
            share = 8 * slot_bytes // 3 if self.told_every else 4 * slot_bytes
            least = max(2 * slot_bytes + self.bytes_per_step, share + 4)
            raise BadInput(
                f"memory = {format_bytes(self.memory_bytes)} is too little: the record of a step takes"
                f" {format_bytes(slot_bytes)}, of which two must fit beside the copies for a base. Give at least"
                f" {least} bytes."
            )
        return max(2, min(BOUND, room // max(slot_bytes, 1)))


class CopyBytes(NamedTuple):
    """The memory of one rank that copies are known to take where the disk is behind, before any optimizer's step."""

    num_slots: int
    slot_bytes: int
    base_bytes: int
    """Bytes of copies of a base."""
    had_bytes: int = 0
    """Bytes of these that are taken already, by a process whose copies end when this one begins."""

    @property
    def needed(self) -> int:
        return max(0, self.num_slots * self.slot_bytes + self.base_bytes - self.had_bytes)


def slots_for_free_memory(ranks: Ranks, copies: CopyBytes, options: Options) -> int:
    """Return the number of staging buffers that the free memory of the machine has room for, at most ``copies`` has.

    Staging buffers are made when they are first needed, so nothing else would show a lack before the first steps.
    Without ``memory=``, fewer are taken, at least two, with a warning. Collective: every rank must call this.

    Args:
        ranks: The ranks, of which those of one machine share its memory.
        copies: What the copies of this rank may fill.
        options: The options, with ``memory=``.

    Raises:
        BadInput: A ``memory=`` that the user gave is more than is free.
    """
    gathered = ranks.everyone((this_machine(), socket.gethostname(), copies, free_host_bytes()))
    lacking = ""
    slots = copies.num_slots
    for machine, host, _, _ in gathered:
        of_machine = [(CopyBytes(*each), free) for where, _, each, free in gathered if where == machine]
        needed, free = sum(each.needed for each, _ in of_machine), min(free for _, free in of_machine)
        if needed <= free:
            continue
        of_ranks = f" of {len(of_machine)} ranks" * (len(of_machine) > 1)
        lacking = (
            f"memory = {format_bytes(options.memory_bytes)} is more than {host} has: the copies{of_ranks} that wait to"
            f" be written may take {format_bytes(needed)}, and {format_bytes(free)} are free (within the limit of the"
            " container, if there is one)."
        )
        if options.has_given_memory:
            raise BadInput(f"{lacking} Give less, or free some.")
        if machine == this_machine():
            each_bytes = sum(each.slot_bytes for each, _ in of_machine)
            left = free - sum(each.base_bytes - each.had_bytes for each, _ in of_machine)
            slots = min(slots, max(2, left // max(1, each_bytes)))
    if lacking and not ranks.rank:
        warnings.warn(
            f"{lacking} So fewer buffers are taken, two at least. Give memory= to choose, or free some.",
            stacklevel=3,
        )
    return slots


def refuse_no_room_for_best(options: Options, state: LiveState) -> None:
    """Raise ``BadInput`` if ``storage=`` cannot hold the best snapshots, the two newest and one in the making."""
    keep, cap = options.keep, options.storage_bytes
    if keep.best is None or cap is None:
        return
    frozen, owned = frozen_in(state), owned_by(state)
    sizes = {name: sum(tensor.nbytes for _, tensor in held.values()) for name, held in owned.items()}
    once = sum(nbytes for name, nbytes in sizes.items() if name in frozen)
    each = sum(sizes.values()) - once
    least = once + each * (max(keep.last, 2) + keep.best + 1)
    if least > cap:
        raise BadInput(
            f"storage = {format_bytes(cap)} is too little for Keep(last={keep.last}, best={keep.best}): bases of"
            f" {format_bytes(each)} take {format_bytes(least)}, without records. Give more, or keep fewer."
        )


def one_model(given: Any) -> nn.Module:
    """Return the given model, or the given stages of a pipeline as one. Raises ``BadInput`` for anything else."""
    several = isinstance(given, Iterable) and not isinstance(given, (nn.Module, str))
    parts: tuple[Any, ...] = tuple(given) if several else (given,)
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts)) or "nothing"
        raise BadInput(f"model is not a torch.nn.Module, nor several stages of one ({kinds}).")
    return parts[0] if len(parts) == 1 else PipelineStages(parts)


def optimizers_of(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the given optimizer or optimizers as a tuple. Raises ``BadInput`` for anything else."""
    several = isinstance(given, Iterable) and not isinstance(given, (torch.optim.Optimizer, str))
    optimizers: tuple[Any, ...] = tuple(given) if several else (given,)
    if not optimizers or not all(isinstance(item, torch.optim.Optimizer) for item in optimizers):
        kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in optimizers)) or "nothing"
        raise BadInput(
            f"optimizer is not an optimizer of torch, nor several of them ({kinds}). One that wraps another is given as"
            " the one inside."
        )
    for optimizer in optimizers:
        _refuse_wrapper(optimizer)
        _refuse_without_step(optimizer)
        refuse_closures(optimizer)
    return optimizers


def _refuse_without_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``BadInput`` for a class that updates parameters elsewhere than in ``step``, where no hook sees it."""
    if inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Optimizer.step):
        kind = type(optimizer).__name__
        raise BadInput(
            f"{kind} has no step() of its own, and updates parameters in another place (LOMO in the backward pass), so"
            " that no step would be recorded. Use another optimizer; holdfast.offload trains with as little memory."
        )


def _refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``BadInput`` for a wrapper of an optimizer with separate state, which no commit would hold."""
    for name, value in vars(optimizer).items():
        items = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        for inner in items:
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
                raise BadInput(
                    f"{type(optimizer).__name__} wraps a {type(inner).__name__} ({name}), which has the state, so that"
                    f" no commit would hold it. Give the one inside, optimizer.{name}, if its step() is what updates;"
                    " several as a list, and what the wrapper does besides as after_update=."
                )


def refuse_renormalised(model: nn.Module) -> None:
    """Raise ``BadInput`` where the forward pass changes parameters, since records of gradients do not hold that."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(
            module, (nn.Embedding, nn.EmbeddingBag)
        ):
            raise BadInput(
                f"{name or 'the model'} has max_norm={module.max_norm}, by which its forward pass changes its weight,"
                " and no record would. Leave it out, and bound the rows in after_update= (torch.renorm)."
            )


def warn_of_rank_allocator(model: nn.Module) -> None:
    """Warn of PEFT's AdaLoRA, whose running averages are in an object that no commit holds."""
    if any("rankallocator" in vars(module) for module in model.modules()):
        warnings.warn(
            "AdaLoRA's rankallocator keeps running averages that the run does not store. If the script calls"
            " update_and_allocate(), training after a resume may choose other LoRA ranks. Use LoRA to avoid that.",
            stacklevel=4,
        )


def refuse_sparse_gradients(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ``BadInput`` where gradients will be sparse, since records hold dense ones."""
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad and id(module.weight) in updated:
            raise BadInput(
                f"{name or 'the model'} makes sparse gradients, which records do not hold. Build it with"
                " sparse=False, and give its weight to an optimizer of dense gradients (AdamW)."
            )
    if any(isinstance(optimizer, torch.optim.SparseAdam) for optimizer in optimizers):
        raise BadInput(
            "SparseAdam takes sparse gradients alone, which records do not hold. Build embeddings with sparse=False,"
            " and give their weights to Adam or AdamW."
        )


def refuse_without_values(model: nn.Module) -> None:
    """Raise ``BadInput`` where parameters are on the meta device."""
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise BadInput(
            f"parameter {empty} is on meta, so it has no values. Build the model on a device, or give it memory there"
            " (model.to_empty(device=...) and its own initialisation) before the optimizer and the Checkpointer."
        )


def _refuse_bad(base_every: int | None, when_behind: str, keep: Any, codec: Any) -> None:
    if base_every is not None and not (isinstance(base_every, Integral) and base_every >= 1):
        raise BadInput(
            f"base_every = {base_every!r} must be whole steps, at least 1; leave it out to have it chosen"
        )
    if when_behind not in POLICIES:
        raise BadInput(f"when_behind = {when_behind!r} is not one of {', '.join(POLICIES)}")
    if not isinstance(keep, Keep):
        raise BadInput(f"keep = {keep!r} is no holdfast.Keep, such as Keep(last=2, every=1000)")
    if not isinstance(codec, Codec):
        raise BadInput(
            f"codec = {codec!r} is not a codec: holdfast.Exact(), holdfast.TopK(0.01), holdfast.Int8()"
        )


def _refuse_bad_every(options: Options) -> None:
    every, base_every, codec = options.every, options.base_every, options.codec
    is_number = isinstance(every, Integral) and not isinstance(every, bool) and every >= 1
    if not is_number and every != "auto":
        raise BadInput(
            f"every = {every!r} is neither whole steps, at least 1, nor 'auto'. 1 records every step, 10 makes a base"
            " of each tenth step and no records, 'auto' chooses by what either costs."
        )
    if every == 1:
        return
    if base_every is not None:
        raise BadInput(
            f"every = {every!r} says how often a base is made, and so does base_every = {base_every}: leave one out"
        )
    if codec.changes_training:
        raise BadInput(
            f"codec={codec} changes training so that the record of every step is small, and every = {every!r} may leave"
            " records out: leave one of the two out"
        )
    if options.wait_each_step:
        raise BadInput(
            f"every = {every!r} leaves steps out, and wait_each_step= keeps each: leave one of the two out"
        )
    if options.has_replica:
        raise BadInput(
            f"every = {every!r} leaves records out, and a replica has none to leave out: leave out every=, or replica="
        )


def _refuse_bad_failures(options: Options) -> None:
    """Raise ``BadInput`` for a time between failures that is none, or that nothing would be chosen by."""
    seconds = options.mean_seconds_between_failures
    if seconds is None:
        return
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < inf):
        raise BadInput(
            f"mean_seconds_between_failures = {seconds!r} must be a positive number of seconds, such as 6 * 3600; leave"
            " it out to have it estimated from restarts"
        )
    if options.base_every is not None or options.told_every not in (None, 1) or options.has_replica:
        name = "replica" if options.has_replica else "every" if options.base_every is None else "base_every"
        raise BadInput(
            f"mean_seconds_between_failures = {seconds!r} is for choosing how often a base is made, and with {name}="
            " nothing is chosen: leave one of the two out"
        )


def refuse_taken(also: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, thing in also.items():
        if name in given or thing is None:
            raise BadInput(
                f"also has {thing!r} as {name}: give it as {name}=, or another name, or leave it out"
            )


def refuse_bad_resume(step: int | None, before: int | None, exactness: str) -> None:
    if step is not None and before is not None:
        raise BadInput("resume takes step= or before=, not both")
    for name, value, least in (("step", step, 0), ("before", before, 1)):
        if value is not None and not (isinstance(value, Integral) and value >= least):
            raise BadInput(f"resume({name}={value!r}): give the number of a step, at least {least}")
    if exactness not in get_args(Exactness):
        raise BadInput(f"exactness = {exactness!r} is not one of state, continuation, approximate")


def refuse_other_calls(ranks: Ranks, *asked: Any) -> None:
    """Raise ``BadInput`` unless ``resume`` was called with the same arguments on all ranks.

    Collective: every rank must call this.
    """
    calls = ranks.everyone(asked)
    if len(set(calls)) > 1:
        told = ", ".join(f"rank {rank} {step}" for rank, (step, *_) in enumerate(calls))
        raise BadInput(f"resume was called differently on the ranks (to step: {told}); call it alike on all")


def refuse_unequal(ranks: Ranks, **given: Any) -> None:
    """Raise ``BadInput`` unless each of the arguments ``given`` is the same on all ranks.

    Collective: every rank must call this.
    """
    gathered = ranks.everyone(given)
    for name in given:
        if len({each[name] for each in gathered}) > 1:
            which = ", ".join(f"rank {rank} {each[name]!r}" for rank, each in enumerate(gathered))
            raise BadInput(f"{name}= is not the same on all ranks ({which}). Give all the same.")


def refuse_of_several(ranks: Ranks, options: Options) -> None:
    """Raise ``BadInput`` for options that only one process can use."""
    if ranks.alone:
        return
    refuse_weights(options.keep, f"{ranks.world_size} ranks")
    if options.when_behind == "skip":
        raise BadInput(
            'when_behind="skip" is for one process. Give "commit": after steps that one of several ranks could not'
            " record, all make a base at once."
        )


def refuse_with_a_replica(
    ranks: Ranks,
    options: Options,
    optimizers: Sequence[torch.optim.Optimizer],
    after_update: Any,
    averages: Any,
) -> None:
    """Raise ``BadInput`` for options of a ``Checkpointer`` that a replica cannot follow."""
    refuse_best(options.keep, "a replica, which makes the bases,")
    refuse_weights(options.keep, "a replica")
    odd = [type(o).__name__ for o in optimizers if not is_elementwise(o)]
    if odd and not ranks.alone:
        raise BadInput(
            f"a replica has what one of {ranks.world_size} ranks stores, and {odd[0]} needs all to update any of it:"
            " leave out replica=, and every step is recorded on the disk instead"
        )
    if options.codec != Exact():
        raise BadInput(
            f"a replica is handed dense gradients: leave out codec={options.codec}, or leave out replica="
        )
    if after_update is not None or averages is not None or options.when_behind == "skip":
        raise BadInput(
            "a replica cannot call after_update, keep averages= or skip steps: leave these out, or leave out replica="
        )
    if options.storage is not None:
        raise BadInput(
            f"storage = {options.storage} is for records, and a replica leaves none: the disk has as many bases as"
            " keep= says. Leave it out, or leave out replica="
        )
    if options.wait_each_step:
        raise BadInput(
            "wait_each_step= with replica= would make a base of every step, since a replica has the others in memory:"
            " leave out one of them. replica_step says what survives the death of the process."
        )


def refuse_clipping(state: LiveState, clip_norm: float | None) -> None:
    """Raise ``BadInput`` where no single norm exists to clip by.

    torch has no norm of gradients that are sharded over several meshes, or only partly sharded. In a pipeline no rank
    has all gradients. Several optimizers step one after the other.
    """
    if clip_norm is None:
        return
    if not clip_norm > 0:
        raise BadInput(f"clip_norm = {clip_norm} must be more than 0")
    if len(state.optimizers) > 1:
        raise BadInput(
            f"clip_norm = {clip_norm}: each of {len(state.optimizers)} optimizers would have its own gradients clipped"
            " by their own norm. Clip all in the script, or give one optimizer of all (holdfast.optim.Joined)."
        )
    cuts = {getattr(p.parameter, "device_mesh", None) for p in state.parameters if p.trained}
    if len(cuts) > 1:
        raise BadInput(
            f"clip_norm = {clip_norm}: some parameters are sharded, others are not or over other ranks, and torch has"
            " no norm of all. Clip in the script."
        )
    here = {name for p in state.parameters for name in p.names} | {
        a.name for a, _ in state.buffers().values()
    }
    away = sorted(set(state.elsewhere) - here)
    if away:
        raise BadInput(
            f"clip_norm = {clip_norm}: this rank does not hold {away[0]}, so it has no norm of all. Clip in the script."
        )


def refuse_with_nodes(ranks: Ranks, nodes: Any, replica: Any, disk: Any) -> None:
    """Raise ``BadInput`` for options of a ``Checkpointer`` that ``nodes=`` cannot be used with.

    Collective: every rank must call this.
    """

    def refuse() -> bool:
        if nodes is not None and not isinstance(nodes, LocalDisks):
            raise BadInput(
                f"nodes = {nodes!r} is no holdfast.LocalDisks, such as LocalDisks(partner_offset=1)"
            )
        if nodes is not None and replica is not False:
            raise BadInput(
                "nodes= with replica= is not offered: replicas find each other in one directory that all share. Leave"
                " out one of them."
            )
        if nodes is not None and disk is not None:
            raise BadInput("nodes= takes a directory of the file system: leave out disk=")
        return nodes is not None

    given = ranks.all_do(refuse)
    if len(set(given)) > 1:
        without = ", ".join(str(rank) for rank, there in enumerate(given) if not there)
        raise BadInput(f"nodes= was not given on all ranks (not on {without}). Give it on all, or on none.")


def chosen_cpus(given: HelperCpus, ranks: Ranks, replica: Any) -> tuple[int, ...]:
    """Return the CPUs of this rank's helper threads; none leaves them where they are.

    "auto" takes the CPUs that the system allows and that no rank of this host is confined to, as by ``taskset`` or by a
    launcher that binds each rank to cores. Where ranks may use all CPUs, as is usual, there are none: the system then
    places all threads.

    Collective: every rank must call this. Raises ``BadInput`` for CPUs that the system does not allow.
    """
    with ranks.agreeing():
        _refuse_bad_cpus(given, replica)
    gathered = ranks.everyone((given == "auto", socket.gethostname(), sorted(used_cpus())))
    if given is None:
        return ()
    if not isinstance(given, str):
        return tuple(given)
    used = {cpu for _, host, cpus in gathered if host == gathered[ranks.rank][1] for cpu in cpus}
    return tuple(sorted(allowed_cpus() - used))


def _refuse_bad_cpus(given: Any, replica: Any) -> None:
    if given is None:
        return
    if replica is not False:
        raise BadInput(
            "helper_cpus= with replica= is not offered: the replica writes, in a process of its own. Start the script"
            " with a mask for both (taskset), or leave out one of them."
        )
    if given == "auto":
        return
    is_list = isinstance(given, (list, tuple, set, range)) and all(type(cpu) is int for cpu in given)
    if not is_list or not given:
        raise BadInput(
            f'helper_cpus = {given!r} is neither "auto" nor a list of CPU numbers; leave it out for none'
        )
    allowed = allowed_cpus()
    if not allowed.issuperset(given):
        raise BadInput(
            f"helper_cpus = {sorted(given)}: the system allows this process the CPUs {sorted(allowed)}. Give some of"
            ' these, or "auto".'
        )
