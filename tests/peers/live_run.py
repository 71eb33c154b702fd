"""One rank of a world of DeepSpeed on gloo whose live engines begin from sources, and are saved, by this library.

A job trains ``trained`` steps, loads ``source`` with ``options`` of
``From``, tells what DeepSpeed says that it holds, saves to ``run`` and trains on. What a call refused is told instead,
and whether that left each rank's engine as it was. ``break`` is done to the engine before.
"""

from __future__ import annotations

import random
import warnings

import deepspeed
import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.integrations.deepspeed import load, save
from peers.deepspeed_run import about, begin, engine_of, train
from peers.odd_model import Model, groups_of, loss_of, tokens_of


def everything(engine):
    """By name all tensors of the engine on this rank, and what else it has."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    book = {"DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat",
            "BF16_Optimizer": "fp32_groups_flat_partition"}.get(kind, "single_partition_of_fp32_groups")  # fmt: skip
    found = {}
    for number, master in enumerate(getattr(optimizer, book, ())):
        found[f"master {number}"] = master.detach()
        found |= {f"state {number} {k}": v for k, v in optimizer.optimizer.state.get(master, {}).items()}
    for name, parameter in engine.module.named_parameters():
        found[f"data {name}"] = parameter.detach()
        found[f"part {name}"] = getattr(parameter, "ds_tensor", torch.empty(0)).detach()
    found |= {f"buffer {name}": buffer for name, buffer in engine.module.named_buffers()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
    found["rest"] = repr((groups, schedule, counters, random.getstate()))
    found["random"] = torch.get_rng_state()
    return found


def digest(engine):
    told = xxhash.xxh3_128()
    for name, value in sorted(everything(engine).items()):
        told.update(name.encode())
        if isinstance(value, torch.Tensor):
            value = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        told.update(value if isinstance(value, bytes) else repr(value).encode())
    return told.hexdigest()


def working(engine, stage):
    """What this rank computes with: parameters, frozen ones too, and buffers."""
    found = dict(engine.module.named_buffers())
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach()
    return {name: value.detach().cpu().clone().contiguous() for name, value in found.items()}


def everyone(value):
    found = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def tried(engine, do):
    """What was refused, by rank, and whether that changed nothing; None if it was not."""
    before, refused = digest(engine), None
    try:
        do()
    except holdfast.errors.HoldfastError as error:
        refused = f"{type(error).__name__}: {error}"
    told = everyone((refused, digest(engine) == before))
    return told if any(text for text, _ in told) else None


def spoil(engine, how):
    """Make the engine such as cannot be told."""
    names = [name for name, _ in engine.module.named_parameters()]
    optimizer = engine.optimizer
    if how == "mapping":
        parameter = next(p for p in engine.module.parameters() if getattr(p, "_hp_mapping", None))
        parameter._hp_mapping.hp_fragment_address.start += 1
    elif how == "moved":
        parameter = engine.module.get_parameter(names[0])
        parameter.data = parameter.data.clone()
    elif how == "size":
        optimizer.single_partition_of_fp32_groups[0].data = torch.zeros(3)
    elif how == "position":
        next(iter(optimizer.grad_position.values()))[1] += 1
    elif how == "without a book":
        del optimizer.fp16_groups
    elif how == "accumulating":
        engine.micro_steps = 3
        engine.gradient_accumulation_steps = lambda: 2
    elif how == "counted by another":
        engine.micro_steps = 3
        engine.gradient_accumulation_steps = lambda: 4
        engine.set_gradient_accumulation_boundary(is_boundary=False)
    elif how == "before the step":
        engine.backward(loss_of(engine, tokens_of(0)))
    elif how == "stepped by another":  # which is as good as whole
        engine.micro_steps = 3
        engine.gradient_accumulation_steps = lambda: 4
        engine.set_gradient_accumulation_boundary(is_boundary=True)
    elif how == "experts":
        engine.has_moe_layers = True
    elif how == "pipeline":
        engine.pipeline_parallelism = True
    elif how == "tensor parallel":
        engine.mp_world_size = 2
    elif how == "offloaded":
        optimizer.cpu_offload = optimizer.offload_optimizer = True
    elif how == "counting":
        for group in optimizer.optimizer.param_groups:
            group["step"] = 5
    elif how == "other rank" and deepspeed.comm.get_rank():
        torch.distributed.get_rank = lambda group=None: 0  # it takes itself for the first


def do(job):
    engine = engine_of({"do": "live", "seed": 99, **job})
    told = {}
    if job.get("trained"):
        train(engine, job, 0, job["trained"])
        if job["stage"] and "optimizer" not in job:
            about(engine, job)  # after which DeepSpeed knows where state is
    rank_of = torch.distributed.get_rank
    spoil(engine, job.get("break"))
    start = engine.global_steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if job.get("only_saves"):
            told["refused"], start = tried(engine, lambda: save(engine, job["run"])), None
        elif job.get("source"):
            options = holdfast.From(job["source"], **job.get("options", {}))
            starts = []
            told["refused"] = tried(engine, lambda: starts.append(load(engine, options)))
            [start] = starts or [None]
    torch.distributed.get_rank = rank_of
    told |= {
        "start": start,
        "warned": [str(each.message) for each in caught if "beginning" in str(each.message)],
    }
    if start is not None:
        kept = getattr(engine.optimizer, "persistent_parameters", [])
        told["persistent"] = [parameter.ds_status.name for parameter in kept]
        told["linked"] = getattr(engine.optimizer, "_hp_optimizer_states_linked", False)
        shown = working(engine, job["stage"])
        each = everyone(shown)
        told["working_alike"] = all(torch.equal(one[name], shown[name]) for one in each for name in shown)
        told["working"] = shown
        told |= about(engine, job) if any(engine.optimizer.optimizer.state.values()) else {}
        told["counters"] = (
            engine.global_steps,
            engine.global_samples,
            engine.skipped_steps,
            engine.micro_steps,
        )
        steps = [state.get("step") for state in engine.optimizer.optimizer.state.values()]
        told["steps"] = [float(step) for step in steps if step is not None]
        told["counted_in"] = sorted({type(step).__name__ for step in steps})
        every = [v for state in engine.optimizer.optimizer.state.values() for v in state.values()]
        told["held_as"] = sorted({str(v.dtype) for v in every if isinstance(v, torch.Tensor)})
        told["updated_by"] = type(engine.optimizer.optimizer).__name__
        if job.get("run"):
            told["saved"] = save(engine, job["run"])
        told["losses"], told["rates"] = train(engine, job, start, job.get("steps", 3))
        states = engine.optimizer.optimizer.state.values()
        told["steps_later"] = [float(state["step"]) for state in states if "step" in state]
        if job.get("later"):
            told["saved_later"] = save(engine, job["later"])
    engine.destroy()
    return told


def fsdp2(job):
    """A run of a Checkpointer of FSDP2."""
    torch.manual_seed(7)
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model))
    world, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    with holdfast.Checkpointer(job["run"], model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for step in range(3):
            loss_of(model, tokens_of(step).chunk(world)[rank]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    return {}


def main(rank, world_size, rendezvous, say, *, jobs):
    begin(rank, world_size, rendezvous)
    for job in jobs:
        told = fsdp2(job) if job.get("do") == "fsdp2" else do(job)
        if deepspeed.comm.get_rank() == 0:
            torch.save(told, job["report"])
