"""Checkpoints as DeepSpeed 0.19.8 writes them, without it: its fields, its class names, its arithmetic in plain lines.

Paddings are NaN, so that none can come to anywhere unseen. ``tests/peers`` compares the fields with those of real ones.
"""

from __future__ import annotations

import shutil
import sys
import types
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

NAN = float("nan")


def _class(module, name, **body):
    return type(name, (), {"__module__": module, "__qualname__": name, **body})


FRAGMENT = _class("deepspeed.utils.tensor_fragment", "fragment_address")
SCALER = _class("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
STAGE = _class(
    "deepspeed.runtime.zero.config", "ZeroStageEnum",
    __init__=lambda self, number: setattr(self, "number", number), __reduce__=lambda self: (type(self), (self.number,)),
)  # fmt: skip


def made(kind, **fields):
    thing = kind.__new__(kind)
    thing.__dict__.update(fields)
    return thing


@contextmanager
def _installed():
    """The classes of DeepSpeed can be found by name, as they are where it is installed."""
    stubs = {}
    for kind in (FRAGMENT, SCALER, STAGE):
        parts = kind.__module__.split(".")
        for end in range(1, len(parts) + 1):
            stubs.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        setattr(stubs[kind.__module__], kind.__name__, kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        yield


def save(content, path):
    with _installed():
        torch.save(content, path)


def load(path):
    with _installed():
        return torch.load(path, weights_only=False)


@dataclass
class State:
    """What a checkpoint is of: by group the masters of parameters, and by slot tensors of their shapes."""

    groups: list[dict[str, torch.Tensor]]
    slots: dict[str, dict[str, torch.Tensor]]
    step: int = 7
    step_is_tensor: bool = True
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def expected(self):
        """Every tensor by key, as it has to be read."""
        found = {f"{name}/param": t for group in self.groups for name, t in group.items()}
        found |= {f"{name}/{slot}": t for slot, named in self.slots.items() for name, t in named.items()}
        if self.step is not None:
            found |= {
                f"{name}/step": torch.tensor(float(self.step)) for group in self.groups for name in group
            }
        found |= {f"{name}/param": t.to(self.dtype) for name, t in self.frozen.items()}
        return found | {f"{name}/buffer": t for name, t in self.buffers.items()}

    def hyper_parameters(self, group):
        return {"lr": 1e-3 * (group + 1), "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 * group}


def random_state(groups, slots=("exp_avg", "exp_avg_sq"), seed=0, **about):
    """``groups`` are the shapes of parameters by name."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape):
        return torch.randn(tuple(shape), generator=generator)

    return State(
        [{name: tensor(shape) for name, shape in group.items()} for group in groups],
        {slot: {name: tensor(shape) for group in groups for name, shape in group.items()} for slot in slots},
        **about,
    )


def write(root, state, stage, world, *, tag="global_step7", **options):
    """The checkpoint of ``state``, with ``latest``. Returns the folder of the tag.

    ``mp`` is the model-parallel rank that ``state`` is of; ``beside`` goes to the model states.
    """
    folder = Path(root) / tag
    folder.mkdir(parents=True, exist_ok=options.get("mp", 0) > 0)
    (Path(root) / "latest").write_text(tag)
    (_write_3 if stage == 3 else _write_12)(folder, state, stage, world, **options)
    return folder


def _write_12(
    folder, state, stage, world, *,
    alignment=1, deal=False, stripped=True, mappings=True, elastic=False, mp=0, beside=None,
):  # fmt: skip
    groups = [_dealt(group, world) if deal else dict(group) for group in state.groups]
    own = [{name: (start, t.numel()) for name, start, t in _placed(group, 1)} for group in state.groups]
    flats = {
        slot: [_flat(group, named, world, alignment) for group in groups] for slot, named in _named(state)
    }
    paddings = [_paddings(group, alignment) for group in groups]
    for rank in range(world):
        cut = {slot: [_part(flat, rank, world) for flat, _ in each] for slot, each in flats.items()}
        over = [
            max(0, (rank + 1) * len(flat) // world - max(n, rank * len(flat) // world))
            for flat, n in flats["param"]
        ]
        placed = [
            own[g]
            if deal and not any(paddings[g])
            else {n: (s, t.numel()) for n, s, t in _placed(group, alignment)}
            for g, group in enumerate(groups)
        ]
        base = _states(state, cut, [[i] for i in range(len(groups))])
        if elastic:
            base = [{k: _lean(v, over[i]) for k, v in base["state"][i].items()} for i in range(len(groups))]
        about = {
            "loss_scaler": made(SCALER, cur_scale=1.0, dynamic=False), "dynamic_loss_scale": False, "overflow": False,
            "clip_grad": 1.0, "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [
                part[: len(part) - over[g]].clone() if stripped else part for g, part in enumerate(cut["param"])
            ],
            "zero_stage": made(STAGE, number=stage), "group_paddings": over, "param_alignment_paddings": paddings,
            "partition_count": [world] * len(groups), "ds_version": "0.19.8",
            "param_slice_mappings": [
                _mapping(each, rank, len(flats["param"][g][0]) // world) for g, each in enumerate(placed)
            ],
        }  # fmt: skip
        if not mappings:  # of versions before there were any
            del about["param_slice_mappings"], about["param_alignment_paddings"]
        name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        name = f"bf16_{name}" if state.dtype == torch.bfloat16 else name
        save(
            {"optimizer_state_dict": about, "ds_config": _config(stage), "ds_version": "0.19.8"},
            folder / name,
        )
    module = {name: t.to(state.dtype) for group in state.groups for name, t in group.items()}
    module |= {name: t.to(state.dtype) for name, t in state.frozen.items()} | state.buffers
    module |= {alias: module[name] for alias, name in state.shared.items()}
    frozen = OrderedDict((n, t.to(state.dtype)) for n, t in state.frozen.items()) if stage == 2 else None
    content = _model_states(state, stage, world, module, [_shapes(group) for group in groups], frozen)
    save(content | (beside or {}), folder / f"mp_rank_{mp:02d}_model_states.pt")


def _write_3(folder, state, stage, world, *, sub_group=10**9, mp=0, beside=None):
    subs, members = [], []
    for group in state.groups:
        members.append([])
        pending = {}
        for index, (name, tensor) in enumerate(group.items()):
            pending[name] = tensor
            if sum(-(-t.numel() // world) for t in pending.values()) >= sub_group or index == len(group) - 1:
                members[-1].append(len(subs))
                subs.append(pending)
                pending = {}
    for rank in range(world):
        cut = {
            slot: [
                torch.cat([_own(named[name], rank, world) for name in sub] or [torch.empty(0)])
                for sub in subs
            ]
            for slot, named in _named(state)
        }
        about = {
            "zero_stage": made(STAGE, number=3), "loss_scaler": made(SCALER, cur_scale=1.0, dynamic=False),
            "dynamic_loss_scale": False, "overflow": False, "partition_count": world,
            "optimizer_state_dict": _states(state, cut, members), "fp32_flat_groups": cut["param"],
        }  # fmt: skip
        prefix = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}"
        bf16 = "bf16_" if state.dtype == torch.bfloat16 else ""
        save(
            {"optimizer_state_dict": about, "ds_config": _config(3), "ds_version": "0.19.8"},
            folder / f"{bf16}{prefix}_optim_states.pt",
        )
        empty = torch.empty(0, dtype=state.dtype)
        module = {name: empty for group in state.groups for name in group} | dict.fromkeys(
            state.frozen, empty
        )
        module |= dict.fromkeys(state.shared, empty) | state.buffers
        frozen = OrderedDict((n, _own(t.to(state.dtype), rank, world)) for n, t in state.frozen.items())
        content = _model_states(state, 3, world, module, [_shapes(sub) for sub in subs], frozen)
        if rank:
            content["shared_params"] = {}
        save(content | (beside or {}), folder / f"{prefix}_model_states.pt")


def _model_states(state, stage, world, module, shapes, frozen):
    return {
        "module": OrderedDict(module), "buffer_names": list(state.buffers), "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None if frozen is None else _shapes(state.frozen),
        "shared_params": state.shared, "frozen_param_fragments": frozen,
        "lr_scheduler": {"last_batch_iteration": 6}, "data_sampler": None, "random_ltd": None, "skipped_steps": 2,
        "global_steps": (state.step or 0) + 2, "global_samples": 108, "dp_world_size": world, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": _config(stage),
        "ds_version": "0.19.8", "epoch": 4,
    }  # fmt: skip


def _config(stage):
    return {"train_batch_size": 12, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}


def _states(state, cut, members):
    """The base optimizer's state dict: it has one flat tensor for each of a group's members."""
    states = {}
    for numbers in members:
        for number in numbers:
            states[number] = {slot: each[number] for slot, each in cut.items() if slot != "param"}
            if state.step is not None:
                step = torch.tensor(float(state.step)) if state.step_is_tensor else state.step
                states[number] = {"step": step, **states[number]}
    groups = [{**state.hyper_parameters(g), "params": numbers} for g, numbers in enumerate(members)]
    return {"state": states if len(cut) > 1 else {}, "param_groups": groups}


def _named(state):
    yield "param", {name: t for group in state.groups for name, t in group.items()}
    yield from state.slots.items()


def _dealt(group, world):
    """The order of ``round_robin_gradients``: to the ranks in turn."""
    names = list(group)
    return {names[i]: group[names[i]] for rank in range(world) for i in range(rank, len(names), world)}


def _paddings(group, alignment):
    found, at = [], 0
    for index, tensor in enumerate(group.values()):
        at += tensor.numel()
        found.append(0 if index == len(group) - 1 else -at % alignment)
        at += found[-1]
    return found


def _placed(group, alignment):
    at = 0
    for (name, tensor), padding in zip(group.items(), _paddings(group, alignment), strict=True):
        yield name, at, tensor
        at += tensor.numel() + padding


def _flat(group, named, world, alignment):
    """A group as one tensor, padded; and how long it is without the padding at its end."""
    n = sum(t.numel() for t in group.values()) + sum(_paddings(group, alignment))
    flat = torch.full((-(-n // (2 * world)) * 2 * world,), NAN)
    for name, at, tensor in _placed(group, alignment):
        flat[at : at + tensor.numel()] = named[name].reshape(-1)
    return flat, n


def _part(flat, rank, world):
    size = len(flat) // world
    return flat[rank * size : (rank + 1) * size].clone()


def _lean(value, over):
    return value[: len(value) - over].clone() if isinstance(value, torch.Tensor) and value.dim() else value


def _mapping(placed, rank, size):
    found = OrderedDict()
    for name, (start, count) in placed.items():
        low, high = max(start, rank * size), min(start + count, (rank + 1) * size)
        if low < high:
            found[name] = made(FRAGMENT, numel=high - low, start=low - rank * size)
    return found


def _own(tensor, rank, world):
    """A rank's part of a parameter of ZeRO-3, padded."""
    each = -(-tensor.numel() // world)
    part = torch.full((each,), NAN, dtype=tensor.dtype)
    mine = tensor.reshape(-1)[rank * each : (rank + 1) * each]
    part[: len(mine)] = mine
    return part


def _shapes(group):
    return OrderedDict((name, t.shape) for name, t in group.items())


def write_universal(root, state, stage, world=2, *, tag="global_step7"):
    """What DeepSpeed's converter makes of the checkpoint of ``state``. Returns the folder of the tag."""
    folder = Path(root) / tag
    source = write(Path(root) / "source", state, stage, world)
    (folder / "zero").mkdir(parents=True)
    (Path(root) / "latest_universal").write_text(tag)
    for path in source.glob("*model_states.pt"):
        shutil.copy(path, folder)
    common = load(sorted(source.glob("*optim_states.pt"))[0])["optimizer_state_dict"]
    if stage == 3:
        common["param_groups"] = common["optimizer_state_dict"]["param_groups"]
    else:
        common["param_groups"] = common.pop("base_optimizer_state")["param_groups"]
        del common["single_partition_of_fp32_groups"], common["param_slice_mappings"]
    save(common, folder / "zero" / "optimizer_state.pt")
    for slot, named in _named(state):
        for name, tensor in named.items():
            (folder / "zero" / name).mkdir(exist_ok=True)
            content = tensor.reshape(-1) if stage == 3 else {"param": tensor, "cat_dim": 0}
            save(content, folder / "zero" / name / f"{'fp32' if slot == 'param' else slot}.pt")
            if stage < 3:
                step = torch.tensor(float(state.step)) if state.step_is_tensor else state.step
                save(step, folder / "zero" / name / "step.pt")
    if stage < 3:  # what has no optimizer state is there as well, as fp32
        for name, tensor in (state.frozen | state.buffers).items():
            (folder / "zero" / name).mkdir()
            save({"param": tensor.to(state.dtype).float()}, folder / "zero" / name / "fp32.pt")
    return folder
