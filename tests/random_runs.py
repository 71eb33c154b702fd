"""Random trainings under a Checkpointer, by seed: processes of one run that do anything, are killed, and resume.

A *sequence* is one tiny training in several *lives*, each a process forked from one that has torch loaded. A life draws
options, resumes, does random things with the training and with the Checkpointer, and ends in some way: closed, killed
at a failpoint or at a moment. Between lives the run may be verified, compacted, pruned, copied or damaged. Before each
step ends, a plain copy of everything goes to the parent, which outlives the kill. After each resume and rollback:

* the state is that copy of the step that it names, bit for bit;
* the step is not before the newest that was durable, or a warning says what was lost;
* steps that are done again, by the same operations, have the same copies as before.

    python tests/random_runs.py 1 1000            # seeds, until one fails, which prints its operations
"""

from __future__ import annotations

import atexit
import copy
import errno
import faulthandler
import gc
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what an optimizer imports at its first step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from buckets import emptied
from holdfast import checkpointer as checkpointer_module
from holdfast import failpoints
from holdfast.checkpoint import bucket_copy
from holdfast.checkpoint.compression.codecs import Exact
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.recovery.run_recovery import state_at
from holdfast.checkpoint.replica import shared_memory
from holdfast.checkpoint.snapshot import snapshot_chunks
from holdfast.checkpointer import Checkpointer
from holdfast.cli import inspect as cli_inspect
from holdfast.errors import (
    BadInput,
    DiskFailed,
    Diverged,
    DoesNotFit,
    EngineFailed,
    HoldfastError,
    NoCommit,
    RunMismatch,
)
from holdfast.measure import drive_rates
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.log import journal, striping
from support.switching import copy_often, switch_often

PATIENCE_SECONDS = 60.0
POINTS = [*failpoints.NAMES, *failpoints.RECORDING, *failpoints.JOURNAL, "in_replay"]

BUCKET = "s3://bucket/runs/a"


@cache
def served() -> str:
    """The address of a server that speaks S3, in a process that ends with this one."""
    serve = (
        "import sys, buckets\nfor address in buckets.served(): print(address, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert server.stdout is not None
    return server.stdout.readline().strip()


# The training


class Net(nn.Module):
    """Odd shapes, and what ``kinds`` asks for. ``late`` layers join the optimizer during training."""

    def __init__(self, kinds: frozenset[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.first, self.second = nn.Linear(6, 11), nn.Linear(11, 4, bias=False)
        self.norm = nn.BatchNorm1d(11) if "norm" in kinds else nn.Identity()
        self.drop, self.scale = nn.Dropout(0.2), nn.Parameter(torch.ones(()))
        self.register_buffer("phase", torch.zeros(3))
        if "words" in kinds:
            self.words = nn.Embedding(300, 6)
        if "spare" in kinds:
            self.spare = nn.Linear(3, 4)
        if "tied" in kinds:
            self.third = nn.Linear(11, 4, bias=False)
            self.third.weight = self.second.weight
        if "frozen" in kinds:
            self.base = nn.Linear(6, 11).requires_grad_(False)
        if "passing" in kinds:
            self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.late = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(2 * ("late" in kinds)))

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        if "words" in self.kinds:
            x = x + self.words(torch.randint(0, 300, (len(x),)))
        hidden = self.first(x)
        if "frozen" in self.kinds:
            hidden = hidden + self.base(x)
        hidden = self.drop(torch.relu(self.norm(hidden)))
        out = self.second(hidden) * self.scale + self.phase.sum()
        if "tied" in self.kinds:
            out = out + self.third(hidden)
        if spare and "spare" in self.kinds:
            out = out + self.spare(x[:, :3])
        if "passing" in self.kinds and self.training:
            self.seen.add_(out.detach().mean())
        for layer in self.late:
            out = out + layer(out)
        return out


class Notes:
    """An object of the script: a text that grows, a tensor, and a generator of its own."""

    def __init__(self) -> None:
        self.text, self.kept, self.own = "", torch.zeros(2), torch.Generator().manual_seed(3)

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, "kept": self.kept.clone(), "own": self.own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self.kept = state["text"], state["kept"].clone()
        self.own.set_state(state["own"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.01, **how),
    "amsgrad": lambda p, **how: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01, **how),
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.05, momentum=0.9, **how),
    "plain": lambda p, **how: torch.optim.SGD(p, lr=0.05, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.02, **how),
    "nadam": lambda p, **how: torch.optim.NAdam(
        p, lr=0.005, **{k: v for k, v in how.items() if k != "fused"}
    ),
    "rmsprop": lambda p, **how: torch.optim.RMSprop(
        p, lr=0.002, momentum=0.5, **{k: v for k, v in how.items() if k != "fused"}
    ),
}
KINDS = ("norm", "words", "spare", "tied", "frozen", "passing", "late")
EXTRAS = ("schedule", "plateau", "scaler", "loader", "notes", "ema", "two", "clip_norm", "best", "zeros")


@dataclass(frozen=True)
class Plan:
    """What a sequence trains, and how its files are cut."""

    kinds: frozenset[str]
    extras: frozenset[str]
    optimizer: str
    unit_bytes: int
    groups_per_segment: int
    drives: bool
    copies: bool
    seed: int
    bucket: bool
    """Whether the run is copied to a bucket."""

    @classmethod
    def of(cls, chance: random.Random) -> Plan:
        kinds = {kind for kind in KINDS if chance.random() < 0.3}
        extras = {extra for extra in EXTRAS if chance.random() < 0.25}
        if extras & {"two", "scaler"}:
            extras.discard("clip_norm")
        if "schedule" in extras:
            extras.discard("plateau")
        if "zeros" in extras:  # gradients of what an iteration does not use would be carried over
            kinds.discard("spare")
        if extras & {"schedule", "plateau"}:
            kinds.discard("late")
        return cls(
            frozenset(kinds), frozenset(extras), chance.choice(sorted(OPTIMIZERS)), chance.choice([300, 1000, 4000]),
            chance.choice([1, 2, 3, 64]), chance.random() < 0.12, chance.random() < 0.5, chance.randrange(10**6),
            chance.random() < 0.15 and all(find_spec(name) for name in ("moto", "obstore")),
        )  # fmt: skip


def plain(value: Any) -> Any:
    """A value without tensors, that is equal only if all bits are."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value


def random_now() -> dict[str, str]:
    """Of the global generators."""
    every = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr(random.getstate()).encode()}
    every["numpy"] = repr(plain(np.random.get_state(legacy=True))).encode()
    return {name: hashlib.md5(state).hexdigest() for name, state in every.items()}


class Training:
    """A model, what trains it, and everything that a script may do to them, by operations that are plain data."""

    def __init__(self, plan: Plan, shape: int, impl: dict[str, bool]) -> None:
        """``shape`` is the number of late layers that the optimizer has; ``impl`` chooses its kernels."""
        self.plan = plan
        torch.manual_seed(plan.seed), random.seed(plan.seed), np.random.seed(plan.seed)
        self.model = Net(plan.kinds)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        make, extras = OPTIMIZERS[plan.optimizer], plan.extras
        if "two" in extras:
            self.optimizers = [make(trained[:2], **impl), torch.optim.SGD(trained[2:], lr=0.01, momentum=0.5)]
        else:
            groups = [{"params": trained[:1], "lr": 0.003}, {"params": trained[1:]}]
            self.optimizers = [make(groups, **impl)]
        self.shape = 0
        for _ in range(shape):
            self.add_group()
        self.things: dict[str, Any] = {}
        self.scheduler = self.scaler = self.loader = None
        if "schedule" in extras:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizers[0], 0.02, 400, cycle_momentum=False
            )
        if "plateau" in extras:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0], patience=1)
        if "scaler" in extras:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        if "loader" in extras:
            data = [torch.full((6,), float(i % 13) / 7) for i in range(23)]
            self.loader = holdfast.loader(data, 5)
        self.notes = Notes() if "notes" in extras else None
        self.averages, self.on_update = None, lambda: None
        self.updated = False
        if "ema" in extras:
            self.averages = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if "ema" in extras:
            for each in self.optimizers:
                each.register_step_pre_hook(self._note_update)
        self.things = {
            "scheduler": self.scheduler, "scaler": self.scaler, "loader": self.loader,
            "also": None if self.notes is None else {"notes": self.notes},
        }  # fmt: skip

    def _note_update(self, *_: Any) -> None:
        self.updated = True

    def after_update(self) -> None:
        self.averages.update_parameters(self.model)
        self.on_update()

    def add_group(self) -> None:
        layer = self.model.late[self.shape]
        for p in layer.parameters():
            p.requires_grad_(True)
        first = self.optimizers[0].param_groups[0]  # and not the defaults, which are another script's
        kernels = {key: first[key] for key in ("foreach", "fused") if key in first}
        self.optimizers[0].add_param_group({"params": list(layer.parameters()), **kernels})
        self.shape += 1

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def flags(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self.named().items()}

    def set_flags(self, flags: dict[str, bool]) -> None:
        for name, p in self.named().items():
            p.requires_grad_(flags[name])

    def state(self) -> dict[str, Any]:
        """Everything that a resume has to bring back."""
        names = {id(p): name for name, p in self.named().items()}
        slots = [
            {names[id(p)]: plain(dict(slots)) for p, slots in each.state.items() if slots}
            for each in self.optimizers
        ]
        groups = [
            [{key: plain(v) for key, v in group.items() if key != "params"} for group in each.param_groups]
            for each in self.optimizers
        ]
        things = {name: plain(thing.state_dict()) for name, thing in self.thing_list()}
        model = {name: plain(tensor) for name, tensor in self.model.state_dict().items()}
        averages = (
            {} if self.averages is None else {k: plain(v) for k, v in self.averages.state_dict().items()}
        )
        return {
            "model": model, "averages": averages, "slots": slots, "groups": groups, "things": things,
            "random": random_now(),
        }  # fmt: skip

    def thing_list(self) -> list[tuple[str, Any]]:
        every = {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "loader": self.loader,
            "notes": self.notes,
        }
        return [(name, thing) for name, thing in every.items() if thing is not None]

    # One step

    def loss(self, spare: bool) -> torch.Tensor:
        x = torch.randn(5, 6)
        if self.loader is not None:
            x = x + next(self.loader)
        return self.model(x, spare).pow(2).mean()

    def backward(self, op: dict[str, Any]) -> torch.Tensor:
        loss = self.loss(op["spare"])
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss * (float("inf") if op["inf"] else 1.0)).backward()
        return loss

    def update(self, op: dict[str, Any]) -> None:
        """From gradients to updated parameters."""
        for number in op["which"]:
            each = self.optimizers[number]
            if op["twice"] and self.scaler is None:
                each.step()
            if self.scaler is not None and op["clip"]:
                self.scaler.unscale_(each)
            if op["clip"]:
                nn.utils.clip_grad_norm_([p for g in each.param_groups for p in g["params"]], 0.1)
            if self.scaler is None:
                each.step()
            else:
                self.scaler.step(each)
        if self.scaler is not None:
            self.scaler.update()

    def zero(self) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none="zeros" not in self.plan.extras)

    def step(self, op: dict[str, Any], end: Callable[..., None], note: Callable[[], None]) -> None:
        """Do the operation ``op``; ``end`` is ``Checkpointer.step``, before which ``note`` is called."""
        for edit in op["pre"]:
            self.edit(edit, end)
        for micro in range(op["micro"]):
            loss = self.backward(op)
            if op["calls"] and micro < op["micro"] - 1:
                end()
        for edit in op["mid"]:
            self.edit(edit, end)
        self.updated = False
        self.update(op)
        if self.scheduler is not None and 0 in op["which"]:
            self.scheduler.step(*([float(loss.detach())] if "plateau" in self.plan.extras else []))
        for edit in op["post"]:
            self.edit(edit, end)
        self.zero()
        if self.notes is not None:
            self.notes.text += op["text"]
            self.notes.kept.add_(1)
        if self.averages is not None and self.updated:
            self.on_update = note
        else:
            note()
        end(**({"metrics": {"m": op["metric"]}} if op["metric"] is not None else {}))
        self.on_update = lambda: None

    # Edits

    @torch.no_grad()
    def edit(self, edit: dict[str, Any], end: Callable[..., None]) -> None:
        kind, generator = edit["kind"], torch.Generator().manual_seed(edit["seed"])
        each = self.optimizers[edit["seed"] % len(self.optimizers)]
        group = each.param_groups[edit["seed"] % len(each.param_groups)]
        members = [p for g in each.param_groups for p in g["params"]]
        member = members[edit["seed"] % len(members)]
        if kind == "lr":
            group["lr"] = group["lr"] * 0.9
        elif kind == "decay" and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] + 0.01
        elif kind == "betas":
            if "betas" in group:
                group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])
            elif group.get("momentum"):
                group["momentum"] *= 0.95
        elif kind == "weight":
            member.add_(torch.randn(member.shape, generator=generator) * 0.01)
        elif kind == "clamp":
            for p in members:
                p.clamp_(-0.3, 0.3)
        elif kind == "memory":
            member.data = member.data.clone()
        elif kind == "slot":
            for value in each.state.get(member, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == member.shape:
                    value.mul_(0.5)
        elif kind == "clear":
            each.state.clear()
        elif kind == "clear one":
            each.state.pop(member, None)
        elif kind == "reload":
            each.load_state_dict(copy.deepcopy(each.state_dict()))
        elif kind == "flag" and "zeros" not in self.plan.extras:
            self._flip(edit["seed"])
        elif kind == "buffer":
            self.model.phase.add_(torch.randn(3, generator=generator) * 0.01)
        elif kind == "new buffer":
            self.model.phase = self.model.phase + 0.01
        elif kind == "frozen" and "frozen" in self.plan.kinds:
            self.model.base.weight.add_(torch.randn(11, 6, generator=generator) * 0.01)
        elif kind == "other frozen" and "frozen" in self.plan.kinds:
            value = torch.randn(11, 6, generator=generator) * 0.1
            self.model.base.weight = nn.Parameter(value, requires_grad=False)
        elif kind == "group" and self.shape < len(self.model.late):
            self.add_group()
        elif kind == "draw":
            torch.rand(1), random.random(), np.random.rand()
            if self.notes is not None:
                torch.rand(2, generator=self.notes.own)
        elif kind == "schedule" and self.scheduler is not None and "plateau" not in self.plan.extras:
            self.scheduler.step()
        elif kind == "raises":
            hook = each.register_step_pre_hook(_raise)
            with suppress(ZeroDivisionError):
                each.step()
            hook.remove()
        elif kind == "idle":
            with torch.enable_grad():
                self.backward({"spare": False, "inf": False})
            end()
            self.zero()

    def _flip(self, seed: int) -> None:
        names = [n for n in self.named() if not n.startswith(("base", "late", "second"))]
        p = self.named()[names[seed % len(names)]]
        p.requires_grad_(not p.requires_grad)


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


EDITS = (
    "lr", "decay", "betas", "weight", "memory", "slot", "clear", "clear one", "reload", "flag", "buffer", "new buffer",
    "frozen", "other frozen", "group", "draw", "schedule", "idle", "raises",
)  # fmt: skip
POST = ("lr", "decay", "clamp", "buffer", "weight", "draw", "slot")
MID = ("lr", "betas", "draw")


def edits(chance: random.Random, kinds: tuple[str, ...], share: float) -> list[dict[str, Any]]:
    count = chance.choice([1, 1, 2]) if chance.random() < share else 0
    return [{"kind": chance.choice(kinds), "seed": chance.randrange(10**6)} for _ in range(count)]


def operation(chance: random.Random, plan: Plan) -> dict[str, Any]:
    """A step, as plain data."""
    both = [0, 1] if "two" in plan.extras else [0]
    op = {
        "pre": edits(chance, EDITS, 0.3), "mid": edits(chance, MID, 0.1), "post": edits(chance, POST, 0.12),
        "micro": chance.choice([1, 1, 1, 2, 3]), "calls": chance.random() < 0.5, "spare": chance.random() < 0.4,
        "inf": chance.random() < 0.15, "clip": chance.random() < 0.3,
        "twice": chance.random() < 0.05,
        "which": both if chance.random() < 0.8 else [chance.choice(both)], "text": chance.choice(["", "ab", "x" * 99]),
        "metric": chance.random() if "best" in plan.extras and chance.random() < 0.4 else None,
    }  # fmt: skip
    if any(edit["kind"] == "raises" for edit in op["pre"]):  # any end of an iteration is now that of a step
        op |= {"calls": False, "pre": [edit for edit in op["pre"] if edit["kind"] != "idle"]}
    return op


# What has happened


@dataclass
class Version:
    """The state at a step. Two with one ``id`` are equal: what was done from one can be done again from the other."""

    id: int
    state: dict[str, Any]
    flags: dict[str, bool]
    shape: int
    timeline: int


@dataclass
class History:
    """What is known of a run, kept alike by the process that trains and by the parent that outlives it."""

    refs: dict[int, list[Version]] = field(default_factory=dict)
    """The states that a resume at each step may have."""
    ops: dict[int, tuple[dict[str, Any], int, Version]] = field(default_factory=dict)
    """How each step was made, from which version of the step before, and what came out."""
    ahead: dict[int, tuple[dict[str, Any], int, Version]] = field(default_factory=dict)
    """Steps that were abandoned: how they were made, from which version, and what came out."""
    left: dict[int, list[Version]] = field(default_factory=dict)
    """The states of abandoned steps."""
    replaced: dict[int, list[Version]] = field(default_factory=dict)
    """The states that a base, which the script asked for, has replaced: without that base a resume has them."""
    floor: int = -1
    """The newest durable step."""
    bucket_floor: int = -1
    """The newest step that the bucket was said to have."""
    ids: int = 0
    damaged: bool = False
    removed: bool = False
    """True once a file was removed: what it held may be known to nothing else."""
    seems_whole: bool = False
    """What `holdfast verify` said since the last damage."""

    def apply(self, kind: str, *what: Any) -> None:
        if kind == "ref":
            step, version, op, came_from = what
            self.refs = {s: v for s, v in self.refs.items() if s < step} | {step: [version]}
            self.replaced.pop(step, None)
            self.ops[step] = op, came_from, version
            self.ids = max(self.ids, version.id)
        elif kind == "or":
            step, version = what
            self.refs[step] = [*self.refs[step], version]
            self.ids = max(self.ids, version.id)
        elif kind == "only":
            step, number = what
            self.replaced.setdefault(step, []).extend(v for v in self.refs[step] if v.id != number)
            self.refs[step] = [version for version in self.refs[step] if version.id == number]
        elif kind == "durable":
            self.floor = max(self.floor, *what)
        elif kind == "in_bucket":
            self.bucket_floor = max(self.bucket_floor, *what)
        elif kind == "may":
            self.floor = min(self.floor, *what)
            self.bucket_floor = min(self.bucket_floor, *what)
        elif kind == "sound":
            [self.seems_whole] = what
        elif kind == "went":
            self.seems_whole = False
            step, number = what
            for s in [s for s in self.refs if s > step]:
                self.ahead[s] = self.ops[s]
                self.left[s] = self.refs.pop(s) + self.replaced.pop(s, [])
            replaced = self.replaced.pop(step, [])
            self.refs[step] = [v for v in replaced + self.refs[step] if v.id == number]
            self.replaced[step] = [v for v in replaced if v.id != number]
            self.floor = step
            self.bucket_floor = min(self.bucket_floor, step)


def difference(a: Any, b: Any, way: str = "") -> list[str]:
    """The places at which two states differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{way}/{key} is in one alone" for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            found += difference(a[key], b[key], f"{way}/{key}")
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            text
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for text in difference(x, y, f"{way}[{i}]")
        ]
    if a == b:
        return []
    short = [repr(each)[:60] for each in (a, b)]
    return [f"{way}: {short[0]} and {short[1]}"]


# A life


def prepare(plan: Plan, place: Path) -> None:
    """Cut files small, as ``plan`` says, and have copies in memory below ``place``. In a process of its own."""
    snapshot_chunks.UNIT_BYTES, journal.GROUPS_PER_SEGMENT = plan.unit_bytes, plan.groups_per_segment
    checkpointer_module.BASE_BYTES_PER_STEP = 1
    bucket_copy.SECONDS = 0.05
    shared_memory.MEMORY = place / "memory"
    shared_memory.MEMORY.mkdir(exist_ok=True)
    if plan.drives:
        drive_rates.rate_of, drive_rates.device_of = lambda directory, limits: 1e9, hash
        striping.STRIPE_BYTES = 4096


class Fault:
    """A disk that takes nothing more from some write on."""

    fired = False

    def arm(self, fails_at: int | None) -> None:
        if fails_at is None:
            return
        left = itertools.count(1)

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def do(*args: Any, **how: Any) -> Any:
                if next(left) >= fails_at:
                    self.fired = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return call(*args, **how)

            return do

        for name in ("pwritev", "posix_fallocate", "pwrite"):
            setattr(os, name, failing(getattr(os, name)))


class Life:
    """One process of the run. Everything that it finds wrong is an ``AssertionError``."""

    def __init__(
        self, plan: Plan, past: History, chance: random.Random, place: Path, send: Callable[..., None]
    ) -> None:
        self.plan, self.past, self.chance, self.place, self._send = plan, past, chance, place, send
        self.fault = Fault()
        self.doing, self.ended = "", -1
        self.errors = os.memfd_create("stderr")
        self.caught: list[warnings.WarningMessage] = []

    def say(self, kind: str, *what: Any) -> None:
        self.past.apply(kind, *what)
        self._send(kind, *what)

    def log(self, *words: Any) -> None:
        self._send("log", " ".join(map(str, words)))

    def main(self, actions: int, ending: str, fails_at: int | None) -> None:
        os.dup2(self.errors, 2)
        self.fault.arm(fails_at)
        prepare(self.plan, self.place)
        with warnings.catch_warnings(record=True) as self.caught:
            warnings.simplefilter("always")
            try:
                self.open()
                for _ in range(actions):
                    self.act()
                self.end(ending)
            except KeyboardInterrupt:
                self.log("interrupted in", self.doing)
                if self.doing:
                    self.ckpt.close()
                if self.doing in ("step", "wait", "save"):
                    self.say("durable", self.ended)
            except HoldfastError as error:
                is_full = isinstance(error, BadInput) and (
                    "storage =" in str(error) or "memory =" in str(error) or "memory=" in str(error)
                )
                if not (is_full or (self.fault.fired and isinstance(error, (DiskFailed, EngineFailed)))):
                    raise
                self.log(type(error).__name__, str(error)[:200])
                if hasattr(self, "ckpt"):
                    with suppress(DoesNotFit, DiskFailed, EngineFailed):
                        self.ckpt.close(save=False)

    # Begin

    def options(self) -> dict[str, Any]:
        chance = self.chance
        every = chance.choice([1, 1, 1, 1, 1, 1, 1, 2, 3, "auto"])
        options: dict[str, Any] = {"every": every, "codec": Exact(compress=chance.random() < 0.3)}
        if every == 1:
            options["base_every"] = chance.choice([None, 1, 2, 3, 5, 9, 1000])
            options["wait_each_step"] = chance.random() < 0.1
        if every == "auto":
            copy_often(self.place / "memory") if self.plan.copies and not self.plan.drives else switch_often()
        keep: dict[str, Any] = {"last": chance.choice([1, 1, 2, 2, 3, 9])}
        if chance.random() < 0.2:
            keep["every"] = chance.choice([2, 5])
        if "best" in self.plan.extras:
            keep |= {"best": 2, "metric": "m", "mode": "min"}
        if chance.random() < 0.1:
            keep["weights"] = 3
        options |= {"keep": Keep(**keep), "when_behind": chance.choice(["block", "block", "skip", "commit"])}
        if chance.random() < 0.2:
            options["memory"] = chance.choice([60_000, 150_000, 500_000])
        if chance.random() < 0.15:
            options["storage"] = chance.choice([500_000, 1_000_000, 3_000_000])
        if self.plan.drives:
            options["drives"] = [
                self.place / f"drive-{name}" for name in chance.choice(["", "a", "ab", "b", "ba"])
            ]
        if "clip_norm" in self.plan.extras:
            options["clip_norm"] = 0.2
        if chance.random() < 0.1:
            options["grace_seconds"] = chance.choice([0.001, 5.0])
        if self.plan.bucket:
            options["remote"] = BUCKET
        return options

    def make(self, shape: int, options: dict[str, Any], impl: dict[str, bool]) -> None:
        self.training = training = Training(self.plan, shape, impl)
        if training.averages is not None:
            options = options | {"averages": training.averages, "after_update": training.after_update}
        self.ckpt = Checkpointer(
            self.place / "run",
            model=training.model,
            optimizer=training.optimizers,
            **training.things,
            **options,
        )

    def open(self) -> None:
        past, chance = self.past, self.chance
        options = self.options()
        impl = chance.choice([{}, {}, {"foreach": True}, {"foreach": False}, {"fused": True}])
        if self.plan.optimizer in ("nadam", "rmsprop", "sgd") and "fused" in impl:
            impl = {}
        steps = sorted(past.refs)
        ask: dict[str, Any] = {}
        if steps and chance.random() < 0.25:
            ask = (
                {"step": chance.choice(steps)}
                if chance.random() < 0.6
                else {"before": chance.choice(steps) + 1}
            )
        self.log("life", options, impl, ask, f"floor {past.floor}", f"steps {steps[:1]}..{steps[-1:]}")
        newest = past.refs[steps[-1]][-1].shape if steps else 0
        if "step" in ask:
            newest = past.refs[ask["step"]][-1].shape
        shapes = sorted(
            range(1 + 2 * ("late" in self.plan.kinds)), key=lambda shape: (shape != newest, -shape)
        )
        if not steps:
            shapes = [0]
        done = self.resume(ask, shapes, options, impl)
        if done is None:
            ask = {}
            done = self.resume(ask, shapes, options, impl)
        said = [str(each.message) for each in self.caught]
        self.log("resumed", done, "|", " | ".join(text[:400] for text in said), "|", self.stderr()[-400:])
        if not steps:
            assert done == 0
            self.say("ref", 0, self.version(), None, -1)
        assert done in past.refs, f"step {done} was never done or was abandoned"
        if ask:
            assert done == ask["step"] if "step" in ask else done < ask["before"]
        if done < self.promised and not ask:
            assert not past.seems_whole, (
                f"resumed step {done} of {self.promised}, and verify called the run whole"
            )
            assert past.damaged, f"resumed step {done}, and step {self.promised} had been durable"
            assert said or past.removed or "had been durable" in self.stderr(), (
                f"steps {done} to {self.promised} are lost, and nothing is said"
            )
        self.arrive(done)
        self.guard = (
            self.ckpt.guard(copy_every=chance.choice([None, 2, 3])) if chance.random() < 0.15 else None
        )
        self.tell_durable()

    def resume(
        self, ask: dict[str, Any], shapes: list[int], options: dict[str, Any], impl: dict[str, bool]
    ) -> int | None:
        """Resume with the first of ``shapes`` that is the run's, and return the step; None if nothing leads there."""
        past, before = self.past, tree(self.place / "run")
        self.promised = past.floor
        for number, shape in enumerate(shapes):
            try:
                self.make(shape, options, impl)
            except BadInput as error:
                assert "memory" in str(error) or "storage" in str(error), error
                assert tree(self.place / "run") == before, "a refused Checkpointer has written"
                self.log("refused:", str(error)[:100])
                options = {k: v for k, v in options.items() if k not in ("memory", "storage")}
                self.make(shape, options, impl)
            if ask:
                self.say("may", ask.get("step", ask.get("before", 1) - 1))
            try:
                return self.ckpt.resume(**ask)
            except RunMismatch as error:
                self.log("mismatch:", str(error)[:150])
                if number == len(shapes) - 1:
                    raise
            except NoCommit as error:
                assert ask, error
                self.log("no commit:", str(error)[:150])
                newest = max(past.refs)
                assert ask.get("step") != newest or past.damaged or self.promised < newest, error
                self.say("durable", self.promised)
                return None
        raise AssertionError("not reached")

    def arrive(self, step: int, but: str = "") -> None:
        """Compare the state with those that ``step`` may have; without the thing ``but``."""
        now, versions = self.training.state(), self.past.refs[step]
        if (
            self.past.damaged
        ):  # a base that the script asked for may be gone, and records lead to what was before
            versions = self.past.replaced.get(step, []) + versions
        found = [v for v in versions if self.without(v.state, but) == self.without(now, but)]
        if not found:
            texts = [" ; ".join(difference(v.state, now)[:8]) for v in versions]
            raise AssertionError(f"the state at step {step} is none of {len(versions)}: {texts}")
        version = found[-1]
        assert self.ckpt.steps_done == step
        self.at = version.id
        assert self.training.shape == version.shape, (self.training.shape, version.shape)
        self.training.set_flags(version.flags)
        self.say("went", step, version.id)

    def without(self, state: dict[str, Any], but: str) -> dict[str, Any]:
        return {**state, "things": {k: v for k, v in state["things"].items() if k != but}}

    def version(self, number: int | None = None) -> Version:
        number = self.past.ids + 1 if number is None else number
        return Version(
            number,
            self.training.state(),
            self.training.flags(),
            self.training.shape,
            self.ckpt._store.timeline,
        )

    def stderr(self) -> str:
        return os.pread(self.errors, 1 << 20, 0).decode(errors="replace")

    def tell_durable(self) -> None:
        if self.ckpt.durable_step > self.past.floor:
            self.say("durable", self.ckpt.durable_step)
        if self.ckpt.remote_durable_step > self.past.bucket_floor:
            self.say("in_bucket", self.ckpt.remote_durable_step)

    # Acts

    def act(self) -> None:
        chance = self.chance
        what = chance.choices(
            ["step", "wait", "save", "rollback", "undo", "pause", "guard", "edit", "data", "misuse"],
            [60, 6, 6, 7, 4, 7, 4, 3, 3, 2],
        )[0]
        self.doing, self.ended = what, self.ckpt.steps_done
        getattr(self, f"do_{what}")()
        self.tell_durable()

    def do_step(self) -> None:
        step = self.ckpt.steps_done + 1
        op, came_from, expected = self.past.ahead.get(step, (None, None, None))
        again = op is not None and came_from == self.at and self.chance.random() < 0.8
        if not again:
            op, expected = operation(self.chance, self.plan), None
        self.log("step", step, "again" * again, json.dumps(op))

        def note() -> None:
            version = self.version(expected.id if expected is not None else None)
            if expected is not None:
                other = difference(expected.state, version.state)
                assert not other, f"step {step}, done again, differs: {other[:8]}"
            self.say("ref", step, version, op, self.at)
            self.at = version.id

        self.training.step(op, self.ckpt.step, note)
        assert self.ckpt.steps_done == step, (self.ckpt.steps_done, step)

    def do_wait(self) -> None:
        step = self.chance.choice([None, self.ckpt.steps_done, max(0, self.ckpt.steps_done - 2)])
        self.log("wait", step)
        self.changed()
        self.ckpt.wait(step)
        until = self.ckpt.steps_done if step is None else step
        assert self.ckpt.durable_step >= until, (self.ckpt.durable_step, until)

    def changed(self) -> None:
        """Note the state as it is now as one that the present step may have."""
        step, old = self.ckpt.steps_done, self.past.refs[self.ckpt.steps_done]
        version = self.version()
        if any(version.state == each.state for each in old):
            return
        kept = old[-1].state
        things = version.state["things"]
        if "loader" in things:  # positions, and random numbers, are those of the step
            things["loader"] = kept["things"]["loader"]
        version.state["random"] = kept["random"]
        if any(version.state == each.state for each in old):
            return
        self.say("or", step, version)
        self.at = version.id

    def do_save(self) -> None:
        self.log("save")
        self.changed()
        self.ckpt.save()
        assert self.ckpt.durable_step == self.ckpt.steps_done
        last = self.past.refs[self.ckpt.steps_done][-1]
        if last.id == self.at:
            self.say("only", self.ckpt.steps_done, last.id)

    def do_edit(self) -> None:
        """Something that the script does between two steps, which ``save`` or the end may see."""
        edit = {
            "kind": self.chance.choice([e for e in EDITS if e not in ("idle", "draw", "raises")]),
            "seed": self.chance.randrange(10**6),
        }
        if edit["kind"] == "group" and self.training.shape < len(self.training.model.late):
            return
        self.log("edit", edit)
        self.training.edit(edit, lambda: None)
        self.at = -self.past.ids - self.chance.randrange(
            1, 10**9
        )  # what follows is done from a state of no commit

    def do_data(self) -> None:
        """A change that nothing counts, and a save after it, as the documentation says."""
        named = self.training.named()
        name = self.chance.choice(sorted(named))
        self.log("data", name)
        named[name].data.mul_(0.99)
        self.do_save()

    def do_pause(self) -> None:
        if self.chance.random() < 0.5:
            self.log("drain")
            self.ckpt._backend.drain()
        else:
            time.sleep(self.chance.uniform(0, 0.02))

    def do_undo(self) -> None:
        """An iteration that does not come to its end, and ``rollback()``."""
        op = operation(self.chance, self.plan) | {"pre": []}
        far = self.chance.random() < 0.5
        self.log("undo", far)
        self.training.backward(op)
        if far:
            self.training.update(op)
            self.training.zero()
        step = self.ckpt.steps_done
        self.say("may", step)
        try:
            assert self.ckpt.rollback() == step
        except NoCommit as error:
            assert self.ckpt.durable_step < step, error
            self.log("refused:", str(error)[:200])
            os.kill(os.getpid(), signal.SIGKILL)
        self.arrive(step)

    def do_misuse(self) -> None:
        """A save while gradients accumulate, which is refused once buffers have changed."""
        self.log("misuse")
        self.changed()
        step = self.ckpt.steps_done
        self.training.edit({"kind": "idle", "seed": 0}, self.ckpt.step)
        try:
            self.ckpt.save()
        except BadInput as error:
            self.log("refused:", str(error)[:100])
        else:
            assert self.ckpt.durable_step == step
        self.say("may", step)
        try:
            self.ckpt.rollback()
        except NoCommit as error:
            assert self.ckpt.durable_step < step, error
            os.kill(os.getpid(), signal.SIGKILL)
        self.arrive(step)

    def do_rollback(self) -> None:
        steps = [step for step in self.past.refs if step <= self.ckpt.steps_done]
        step, before = self.chance.choice(steps), self.training.state()
        self.log("rollback", step)
        at = self.ckpt.steps_done
        old = self.past.floor
        self.say("may", step)
        shape = self.past.refs[step][-1].shape
        try:
            self.ckpt.rollback(step)
        except (NoCommit, RunMismatch) as error:
            self.log("refused:", str(error)[:200])
            if isinstance(error, RunMismatch):  # a buffer that the run has carried since then
                assert shape != self.training.shape or "of seen/buffer it has none" in str(error), error
            assert self.ckpt.steps_done == at
            other = difference(before, self.training.state())
            assert not other, f"a refused rollback changed {other}"
            self.say("durable", old)
            return
        self.arrive(step)

    def do_guard(self) -> None:
        if self.guard is None:
            return
        good = self.chance.random() < 0.6
        self.log("guard", good)
        if good:
            assert not self.guard.check(1.0)
            return
        place = None if self.training.loader is None else plain(self.training.loader.state_dict())
        try:
            self.say("may", 0)
            assert self.guard.check(float("nan"))
        except (Diverged, NoCommit) as error:
            self.log(type(error).__name__, str(error)[:200])
            self.guard = None
            self.tell_durable()
            return
        step = self.ckpt.steps_done
        self.arrive(step, but="loader")
        if place is not None:
            assert plain(self.training.loader.state_dict()) == place, "a guard moves no loader"
            version = self.version()
            self.say("or", step, version)
            self.at = version.id

    # End

    def end(self, ending: str) -> None:
        self.log(ending)
        if ending == "close":
            self.changed()
            step, within = self.ckpt.steps_done, self.chance.random() < 0.25
            if within:  # an iteration that does not come to its end
                self.log("within")
                buffers = {name: buffer.clone() for name, buffer in self.training.model.named_buffers()}
                self.training.backward(operation(self.chance, self.plan))
                for (
                    name,
                    buffer,
                ) in self.training.model.named_buffers():  # else a warning says that the base has these
                    buffer.copy_(buffers[name])
            said = len(self.caught)
            self.ckpt.close()
            if within and any(
                "there can be no base of it" in str(each.message) for each in self.caught[said:]
            ):
                return
            self.say("durable", step)
        elif ending == "error":
            self.ckpt.close(save=False)
        elif ending == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                self.do_step()
            except SystemExit as error:
                assert error.code == 128 + signal.SIGTERM
            else:
                raise AssertionError("step() has returned after a SIGTERM")
            if "not known to be" not in self.stderr():
                self.say("durable", max(self.past.refs))
        elif ending == "exit":  # the script ends without close()
            step = self.ckpt.steps_done
            atexit._run_exitfuncs()
            if "are not durable" not in self.stderr():
                self.say("durable", step)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def tree(root: Path) -> dict[str, str]:
    """Every file below ``root``, but the log for people, with a digest of its content."""
    found = {}
    for path in sorted(root.rglob("*")) if root.exists() else []:
        if path.is_file() and path.name not in ("events.jsonl", "lock"):
            found[str(path.relative_to(root))] = hashlib.md5(path.read_bytes()).hexdigest()
    return found


# Between lives


class Between:
    """What is done to a run that nobody writes."""

    def __init__(
        self, plan: Plan, past: History, chance: random.Random, place: Path, send: Callable[..., None]
    ) -> None:
        self.plan, self.past, self.chance, self.send = plan, past, chance, send
        self.place, self.run = place, place / "run"

    def log(self, *words: Any) -> None:
        self.send("log", " ".join(map(str, words)))

    def main(self, what: str | None) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        prepare(self.plan, self.place)
        acts = ["verify", "compact", "prune", "state", "state", "source", *["bucket"] * 5 * self.plan.bucket]
        what = what or self.chance.choice(acts)
        with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                getattr(self, f"do_{what}")(out)
            except HoldfastError as error:
                self.log(what, type(error).__name__, str(error)[:200])
                ok = isinstance(error, (BadInput, NoCommit)) or self.past.damaged
                assert ok, f"{what}: {type(error).__name__}: {error}"

    def do_verify(self, out: io.StringIO) -> None:
        sound = cli_inspect.verify(str(self.run), as_json=False)
        self.send("sound", sound)
        self.log("verify", sound, out.getvalue()[:300] if not sound else "")
        assert sound or self.past.damaged, f"verify: {out.getvalue()}"

    def do_compact(self, out: io.StringIO) -> None:
        steps = sorted(self.past.refs)
        to = self.chance.choice([None, *steps])
        self.log("compact", to)
        compact(self.run, to)

    def do_source(self, out: io.StringIO) -> None:
        """Begin another run from a step of this one."""
        step = self.chance.choice(sorted(self.past.refs))
        versions = self.past.refs[step] + self.past.replaced.get(step, [])
        self.log("source", step)
        training = Training(self.plan, versions[0].shape, {})
        options: dict[str, Any] = {}
        if training.averages is not None:
            options = {"averages": training.averages, "after_update": training.after_update}
        other = self.place / "other"
        shutil.rmtree(other, ignore_errors=True)
        with Checkpointer(
            other, model=training.model, optimizer=training.optimizers, **training.things, **options
        ) as ckpt:
            assert ckpt.resume(source=f"{self.run}@{step}") == step
            now = training.state()
        texts = [difference(version.state, now) for version in versions]
        assert not all(texts), f"a run that begins from step {step} has another state: {texts}"

    def do_bucket(self, out: io.StringIO) -> None:
        """Begin another run from what the bucket has, as after the loss of the machine."""
        past = self.past
        for step, versions in [*past.refs.items(), *past.left.items()]:
            past.replaced.setdefault(step, []).extend(versions)
        shapes = {version.shape for versions in past.replaced.values() for version in versions}
        other = self.place / "other"
        for number, shape in enumerate(sorted(shapes)):
            training = Training(self.plan, shape, {})
            options: dict[str, Any] = {}
            if training.averages is not None:
                options = {"averages": training.averages, "after_update": training.after_update}
            shutil.rmtree(other, ignore_errors=True)
            try:
                with Checkpointer(
                    other, model=training.model, optimizer=training.optimizers, **training.things, **options
                ) as ckpt:
                    step, now = ckpt.resume(source=BUCKET), training.state()
                break
            except NoCommit as error:
                assert past.bucket_floor < 0, f"the bucket had step {past.bucket_floor}: {error}"
                return
            except RunMismatch:
                if number == len(shapes) - 1:
                    raise
        self.log("bucket", step, "of", past.bucket_floor)
        assert step >= past.bucket_floor, f"the bucket had step {past.bucket_floor} and leads to step {step}"
        texts = [difference(version.state, now) for version in past.replaced[step]]
        assert not all(texts), f"what the bucket has of step {step} is another state: {texts}"

    def do_prune(self, out: io.StringIO) -> None:
        keep = Keep(last=self.chance.choice([1, 2]))
        self.log("prune", keep)
        prune(self.run, keep)

    def do_state(self, out: io.StringIO) -> None:
        """The state of any step, without its script."""
        every = [(step, versions, None) for step, versions in self.past.refs.items()]
        every += [(step, versions, versions[0].timeline) for step, versions in self.past.left.items()]
        step, versions, timeline = self.chance.choice(every)
        self.log("state at", step, timeline)
        state, _ = state_at(self.run, step, timeline)
        if timeline is None:
            versions = versions + self.past.replaced.get(step, [])
        model = {p.name: plain(p.parameter) for p in state.parameters}
        model |= {atom.name: plain(tensor) for atom, tensor in state.buffers().values()}
        slots = {p.name: plain(dict(held)) for p in state.parameters if (held := state._state(p))}
        texts = []
        for version in versions:
            there = {name: value for name, value in version.state["model"].items() if name in model}
            model = {name: value for name, value in model.items() if name in there}
            every = {name: held for each in version.state["slots"] for name, held in each.items()}
            texts.append(difference([there, every], [model, slots]))
        assert not all(texts), f"the state of step {step} is another without its script: {texts}"


def damage(chance: random.Random, run: Path) -> str:
    """Change, cut or remove one file of a run. Returns what was done."""
    kind = chance.choice(["journal", "journal", "data", "data", "commits", "timelines", "index", "any"])
    folder = run if kind == "any" else run / kind
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "lock"]
    if not files:
        return "nothing"
    path = chance.choice(files)
    how, size = chance.choice(["flip", "flip", "cut", "remove"]), path.stat().st_size
    if how == "remove" or not size:
        path.unlink()
        return f"removed {path.relative_to(run)}"
    if how == "cut":
        to = chance.randrange(size)
        os.truncate(path, to)
        return f"cut {path.relative_to(run)} from {size} to {to}"
    content = bytearray(path.read_bytes())
    used = len(content.rstrip(b"\0")) or 1
    at = chance.randrange(used)
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"flipped a bit of {path.relative_to(run)} at {at} of {size}"


# A sequence


@dataclass
class Outcome:
    """What became of a forked process."""

    code: int
    failure: str = ""
    ended: bool = False


def in_child(
    do: Callable[[Callable[..., None]], None], heard: Callable[..., None], kill_after: float | None
) -> Outcome:
    """Fork a process that does ``do``, listen to what it says, kill it after some seconds, and wait for its end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_child(do, writing)
    os.close(writing)
    outcome, buffer = Outcome(0), b""
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            deadline = None
            continue
        data = os.read(reading, 1 << 20)
        if not data:
            break
        buffer += data
        while len(buffer) >= 8 and len(buffer) >= 8 + (size := struct.unpack("Q", buffer[:8])[0]):
            kind, *what = pickle.loads(buffer[8 : 8 + size])
            buffer = buffer[8 + size :]
            if kind == "failed":
                outcome.failure = what[0]
            elif kind == "ended":
                outcome.ended = True
            else:
                heard(kind, *what)
    os.close(reading)
    outcome.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return outcome


def _be_child(do: Callable[[Callable[..., None]], None], writing: int) -> None:
    def send(*what: Any) -> None:
        data = pickle.dumps(what)
        view = memoryview(struct.pack("Q", len(data)) + data)
        while view:
            view = view[os.write(writing, view) :]

    try:
        faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True, file=sys.__stdout__)
        do(send)
        send("ended")
    except BaseException:
        send("failed", traceback.format_exc())
    finally:
        os._exit(0)


def delays(
    chance: random.Random, kill: tuple[str, int] | None, interrupt: tuple[str, int] | None, slow: bool
) -> None:
    """Have this process wait at random failpoints, die at one, or be interrupted as by Ctrl-C."""
    counts: dict[str, int] = {}
    base = chance.randrange(10**9)

    def reach(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1
        if kill == (name, counts[name]):
            os.kill(os.getpid(), signal.SIGKILL)
        if interrupt == (name, counts[name]) and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        if slow:
            own = random.Random(f"{base} {name} {counts[name]}")
            if own.random() < 0.3:
                time.sleep(own.uniform(0, 0.01))

    failpoints.reach = reach


class Sequence:
    """All lives of one run."""

    def __init__(self, seed: int, place: Path) -> None:
        self.seed, self.place, self.lines = seed, place, list[str]()
        self.past, self.kills, self.lives = History(), 0, 0

    def heard(self, kind: str, *what: Any) -> None:
        if kind == "log":
            self.lines.append(what[0])
        else:
            self.past.apply(kind, *what)

    def play(self) -> str:
        """Returns what was wrong, or nothing."""
        chance = random.Random(self.seed)
        plan = self.plan = Plan.of(chance)
        self.lines.append(f"seed {self.seed}: {plan}")
        if plan.bucket:
            with pytest.MonkeyPatch.context() as patch:
                emptied(served(), patch)
                return self._play(plan, chance)
        return self._play(plan, chance)

    def _play(self, plan: Plan, chance: random.Random) -> str:
        lives = chance.randint(2, 6)
        for number in range(lives):
            own = random.Random(f"{self.seed} {number}")
            if wrong := self.live(plan, own, is_last=number == lives - 1):
                return wrong
            if number < lives - 1 and self.past.refs and (wrong := self.between(own)):
                return wrong
            if not self.lines or self.lines[-1] == "over":
                return ""
        return ""

    def live(self, plan: Plan, chance: random.Random, is_last: bool) -> str:
        ending = (
            "close"
            if is_last
            else chance.choice(["close", "close", "error", "term", "exit", "kill", "kill", "kill"])
        )
        actions = 4 if is_last else chance.randint(2, 16)
        kill, after, interrupt = None, None, None
        if not is_last and chance.random() < 0.35:
            kill = chance.choice(POINTS), chance.choice([1, 1, 2, 3, 5, 8])
        elif not is_last and chance.random() < 0.3:
            after = chance.uniform(0, 0.4)
        elif not is_last and chance.random() < 0.2:
            names = [*failpoints.RECORDING, "in_replay", "after_chunk_copied", "after_timeline_opened"]
            interrupt = chance.choice(names), chance.choice([1, 2, 3, 5, 8])
        slow, fails_at = chance.random() < 0.3, None
        if not is_last and chance.random() < 0.08:
            fails_at = int(2 ** chance.uniform(0, 8))

        def do(send: Callable[..., None]) -> None:
            delays(chance, kill, interrupt, slow)
            Life(plan, self.past, chance, self.place, send).main(actions, ending, fails_at)

        outcome = in_child(do, self.heard, after)
        self.lives += 1
        self.lines.append(f"-- {outcome.code} {'ended' * outcome.ended} {kill if outcome.code else ''}")
        if outcome.failure:
            return self.judge(outcome.failure)
        if not outcome.ended and outcome.code != -signal.SIGKILL:
            return f"the process ended with {outcome.code}, or hung"
        self.kills += outcome.code == -signal.SIGKILL
        return ""

    def judge(self, failure: str) -> str:
        """A refusal of a damaged run is what is promised."""
        last = failure.strip().rpartition("\n")[2]
        names = (
            "Damaged",
            "NoCommit",
            "ManifestCorrupt",
            "ChunkCorrupt",
            "FileMissing",
            "DiskFailed",
            "RunMismatch",
            "Unreadable",
            "CommitRetired",
        )
        if self.past.damaged and last.startswith(tuple(f"holdfast.errors.{name}" for name in names)):
            self.lines += [last, "over"]
            return ""
        return failure

    def between(self, chance: random.Random) -> str:
        what = chance.random()
        if what < 0.35:
            return self.maintain(chance, None)
        beside = [*self.place.glob("drive-*"), *self.place.glob("memory/*")]  # belong to the directory
        if what < 0.4 and not beside:
            self.lines.append("copied")
            shutil.copytree(self.place / "run", self.place / "copy", symlinks=True)
            shutil.rmtree(self.place / "run")
            (self.place / "copy").rename(self.place / "run")
        elif what < 0.45:
            self.lines.append("no events")
            (self.place / "run" / "events.jsonl").unlink(missing_ok=True)
        elif what < 0.6:
            done = damage(chance, self.place / "run")
            self.lines.append(done)
            self.past.damaged = True
            wrong = self.maintain(chance, "verify")
            if done.startswith("removed"):  # of a file that is gone verify knows nothing
                self.past.seems_whole, self.past.removed = False, True
            return wrong
        return ""

    def maintain(self, chance: random.Random, what: str | None) -> str:
        """Do one thing to the run, in a process of its own. Returns what was wrong, or nothing."""
        own = random.Random(chance.random())
        outcome = in_child(
            lambda send: Between(self.plan, self.past, own, self.place, send).main(what), self.heard, None
        )
        if outcome.failure or not outcome.ended:
            return outcome.failure or f"between lives: {outcome.code}"
        return ""


@contextmanager
def somewhere() -> Iterator[Path]:
    """A directory of its own, which no process removes at its exit."""
    place = Path(tempfile.mkdtemp(prefix="holdfast-random-", dir="/dev/shm"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def play(seed: int, kind: Callable[[int, Path], Any] = Sequence) -> tuple[Any, str]:
    """Play the sequence of ``seed``. Returns what was wrong, or nothing."""
    with somewhere() as place:
        sequence = kind(seed, place)
        wrong = sequence.play()
        if wrong and os.environ.get("RANDOM_RUNS_KEEP"):
            keep = Path(os.environ["RANDOM_RUNS_KEEP"]) / str(seed)
            shutil.copytree(place, keep, symlinks=True, ignore=shutil.ignore_patterns("socket"))
        return sequence, wrong


def play_some(first: int, last: int, kind: Callable[[int, Path], Any] = Sequence) -> list[str]:
    """Play the sequences of some seeds. Returns the operations of each that went wrong, and what was wrong."""
    every = [play(seed, kind) for seed in range(first, last)]
    return ["\n".join([*sequence.lines, wrong]) for sequence, wrong in every if wrong]


def main(kind: Callable[[int, Path], Any] = Sequence) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a child need not go through what is here
    first, last = int(sys.argv[1]), int(sys.argv[2])
    most = int(sys.argv[3]) if sys.argv[3:] else 1
    lives = kills = failures = 0
    started = time.monotonic()
    for seed in range(first, last):
        sequence, wrong = play(seed, kind)
        lives, kills = lives + sequence.lives, kills + sequence.kills
        if not seed % 20:
            print(seed, lives, kills, flush=True)
        if wrong:
            failures += 1
            print("\n".join(line[:700] for line in sequence.lines))
            print(f"SEED {seed}\n{wrong}\n", flush=True)
            if failures == most:
                break
    seconds = time.monotonic() - started
    print(f"{seed - first + 1} sequences, {lives} lives, {kills} kills, {failures} failures, {seconds:.0f} s")


if __name__ == "__main__":
    main()
