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
        deepspeed.comm.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses


def report(engine, job, losses):
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
    if deepspeed.comm.get_rank() == 0:
        tensors = {key: value.detach().float().cpu().clone().contiguous() for key, value in held.items()}
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups
        ]
        plain = {"losses": losses, "global_steps": engine.global_steps, "groups": groups,
                 "scheduler": engine.lr_scheduler.state_dict(), "seen": engine.module.seen.tolist()}  # fmt: skip
        torch.save({"tensors": tensors, "plain": plain}, job["report"])


def main():
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        engine = engine_of(job)
        if job["do"] == "save":
            losses = train(engine, 0, 3)
            engine.save_checkpoint(job["folder"], client_state={"epoch": 4})
            report(engine, job, losses)
        else:
            engine.load_checkpoint(job["folder"])
            report(engine, job, [])
        engine.destroy()
    print("done", flush=True)


if __name__ == "__main__":
    main()
