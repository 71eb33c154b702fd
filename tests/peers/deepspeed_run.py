"""One world of DeepSpeed on gloo: trains and saves, or loads universal folders; tells what it holds.

Run by torchrun: ``deepspeed_run.py JOBS.json``, a list of jobs, one engine after another in one world (the start of
Python is most of the time of any of them). What each parameter and its optimizer state are, as DeepSpeed reports them
itself, goes to the file ``report`` of the job, by rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

SAVED = 3
"""The step of checkpoints."""


class Model(nn.Module):
    """Odd sizes, tied embeddings, a buffer, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.up = nn.Linear(10, 13)
        self.frozen = nn.Linear(13, 13)
        self.down = nn.Linear(13, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(self.frozen(torch.tanh(self.up(hidden))))))


def engine_of(job):
    torch.manual_seed(7)
    model = Model()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for n, p in named if p.ndim == 1], "weight_decay": 0.0, "lr": 1e-3},
    ]
    optimizer = (
        torch.optim.SGD(groups, lr=1e-3, momentum=0.9) if job.get("sgd") else torch.optim.AdamW(groups)
    )
    config = {
        "train_batch_size": 12,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 2e-3}},
        "zero_optimization": {
            "stage": job["stage"],
            "stage3_param_persistence_threshold": 0,
            **job.get("zero", {}),
        },
        "checkpoint": {"load_universal": job["do"] == "load"},
        **({job["dtype"]: {"enabled": True}} if job.get("dtype") else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine, first, steps):
    losses = []
    world, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    for step in range(first, first + steps):
        tokens = torch.randint(0, 37, (12, 5), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(world)[rank]
        logits = engine(tokens).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses


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
        "scheduler": engine.lr_scheduler.state_dict(),
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


def main():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        engine = engine_of(job)
        own = [group["weight_decay"] for group in engine.optimizer.param_groups]
        if job["do"] == "save":
            train(engine, 0, SAVED)
            engine.save_checkpoint(job["folder"], client_state={"epoch": 4})
        else:
            engine.load_checkpoint(job["folder"])
        told = about(engine, job)
        if job["do"] == "load" and job["stage"] == 3:
            amend(engine, own)
        losses = train(engine, SAVED, 3)
        if deepspeed.comm.get_rank() == 0:
            torch.save({**told, "losses": losses}, job["report"])
        engine.destroy()
    print("done", flush=True)


if __name__ == "__main__":
    main()
