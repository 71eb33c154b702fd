"""One rank of a world of DeepSpeed on gloo: trains and saves, or loads universal folders; tells what it holds.

It is given a list of jobs, and does them with one engine after another. A job with a ``form`` is of the awkward
decoder and not of the odd model. What each parameter and its optimizer state are, as DeepSpeed reports them itself,
goes to the file ``report`` of the job, by rank 0.
"""

from __future__ import annotations

import os

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # seconds of importing, which every engine's first start would take
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from dist.awkward_decoder import Awkward, Form, batch_of, optimizer_of
from peers.odd_model import Model, groups_of, loss_of, tokens_of

SAVED = 3
"""The step of checkpoints."""


def engine_of(job):
    model, optimizer, settings = awkward_of(job) if "form" in job else odd_of(job)
    config = {
        "train_batch_size": 12,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": job["stage"],
            "stage3_param_persistence_threshold": 0,
            **job.get("zero", {}),
        },
        "checkpoint": {"load_universal": job["do"] == "load"},
        **({job["dtype"]: {"enabled": True}} if job.get("dtype") else {}),
        **({"data_types": {"grad_accum_dtype": job["accumulate"]}} if job.get("accumulate") else {}),
        **settings,
    }
    groups = groups_of(model) if optimizer is None else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, config=config
    )
    return engine


def odd_of(job):
    """The odd model, its optimizer or None where DeepSpeed makes that, and what it has beside."""
    torch.manual_seed(job.get("seed", 7))
    model = Model()
    groups = groups_of(model)
    made = {}
    if adam := job.get("made"):
        optimizer, made = None, {"optimizer": {"type": adam, "params": job.get("params", {})}}
    elif job.get("cpu_adam"):
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups)
    elif job.get("sgd"):
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    else:
        optimizer = getattr(torch.optim, job.get("optimizer", "AdamW"))(groups)
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 2e-3}}
    schedule = {} if job.get("unscheduled") else {"scheduler": warm_up}
    return model, optimizer, {"gradient_clipping": 1.0, **schedule, **made}


def awkward_of(job):
    """The awkward decoder, which is trained as the other parallelisms train it."""
    model = Awkward(Form(*job["form"]))
    return model, optimizer_of(model), {"gradient_clipping": 0.0}  # which is 1 where nothing is said


def loss_at(engine, job, step, rank, world):
    """Of this rank's part of the batch."""
    if "form" in job:
        return engine(*(whole.chunk(world)[rank] for whole in batch_of(step)))
    return loss_of(engine, tokens_of(step).chunk(world)[rank])


def train(engine, job, first, steps):
    """The losses, and the learning rates of each step."""
    losses, rates = [], []
    world, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    for step in range(first, first + steps):
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        loss = loss_at(engine, job, step, rank, world)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses, rates


def about(engine, job):
    """What DeepSpeed says of the state, and what of it there is beside."""
    if hasattr(
        engine.optimizer, "_hp_optimizer_states_linked"
    ):  # 0.19.8 links those of the first group alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            held[f"{name}/param"] = safe_get_full_fp32_param(parameter)
            for slot in ["momentum_buffer"] if job.get("sgd") else ["exp_avg", "exp_avg_sq"]:
                held[f"{name}/{slot}"] = safe_get_full_optimizer_state(parameter, slot)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    module = (
        {n: p.detach().clone() for n, p in engine.module.state_dict().items()} if job["stage"] < 3 else {}
    )
    return {
        "tensors": {key: value.detach().float().cpu().clone().contiguous() for key, value in held.items()},
        "module": module,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "groups": groups,
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
    }


def amend(engine, own):
    """What 0.19.8 does wrong when it loads a universal folder into ZeRO-3, whoever wrote that: all groups have the
    hyper-parameters of the first, and all sub-groups one count of steps, which each of them counts up."""
    for group, weight_decay in zip(engine.optimizer.param_groups, own, strict=True):
        group["weight_decay"] = weight_decay
    states = list(engine.optimizer.optimizer.state.values())
    assert states[0]["step"] is states[-1]["step"], "not so by now: leave this out"
    for state in states:
        state["step"] = state["step"].clone()


def begin(rank, world_size, rendezvous):
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    where = {"init_method": rendezvous, "rank": rank, "world_size": world_size}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **where)


def main(rank, world_size, rendezvous, say, *, jobs):
    begin(rank, world_size, rendezvous)
    for job in jobs:
        engine = engine_of(job)
        own = [group["weight_decay"] for group in engine.optimizer.param_groups]
        if job["do"] == "save":
            train(engine, job, 0, SAVED)
            engine.save_checkpoint(job["folder"], client_state={"epoch": 4})
        else:
            engine.load_checkpoint(job["folder"])
        told = about(engine, job)
        if job["do"] == "load" and job["stage"] == 3:
            amend(engine, own)
        losses, rates = train(engine, job, SAVED, job.get("steps", 3))
        if deepspeed.comm.get_rank() == 0:
            torch.save({**told, "losses": losses, "rates": rates}, job["report"])
        engine.destroy()
