"""FSDP1 as ranks of a test have it: how a model is wrapped, clipped, and seen whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from holdfast.checkpointer import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.state import capture
from holdfast.state.fsdp1 import flattened_of
from holdfast.state.live import LiveState
from holdfast.state.stretches import Stretch
from survive_run import digest

STRATEGIES = {
    "grad": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "hybrid2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """Each layer of its own and what is left, or all in one, as the words after "fsdp1" say."""
    words = set(kind.split()[1:])
    options: dict[str, Any] = {"use_orig_params": "flat" not in words, "device_id": torch.device("cpu")}
    if "flat" in words:
        model.requires_grad_(True)
    for word in words & STRATEGIES.keys():
        options["sharding_strategy"] = STRATEGIES[word]
    if words & {"hybrid", "hybrid2"}:
        sizes = 2, dist.get_world_size() // 2
        options["device_mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s"))
    if "apart" in words:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        options["process_group"] = groups[dist.get_rank()]
    if "bf16" in words:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if "buffers" in words:
        options["mixed_precision"] = MixedPrecision(buffer_dtype=torch.bfloat16)
    if "lowgrads" in words:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    if "offload" in words:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if "strided" in words:
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
    if "layers" in words:
        for name in ("first", "second"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
    whole = FullyShardedDataParallel(model, **options)
    return whole.module if "inside" in words else whole


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def clip(model: nn.Module) -> None:
    """As each kind of parallelism does it."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.5)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state, what each rank holds put together by where FSDP1 says that it begins."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _held(model, optimizer))
    found: dict[str, torch.Tensor] = {}
    for rank in every:
        for key, (shape, start, value) in rank.items():
            if value.dim() == 0:
                found[key] = value
            else:
                whole = found.setdefault(key, torch.full(shape, torch.nan, dtype=value.dtype))
                whole.view(-1)[start : start + value.numel()] = value.reshape(-1)
    assert not any(value.isnan().any() for value in found.values())
    return dict(sorted(found.items()))


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, int, torch.Tensor]]:
    """What this rank holds: by key the shape of the whole, where it begins in that, and its values."""
    names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters()}
    mine = {}
    wrappers = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    for handle in (wrapper._handle for wrapper in wrappers if wrapper._handle is not None):
        flat = handle.flat_param
        for p, part, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            held = {"param": p.detach(), **optimizer.state.get(p, {})} if part.in_shard else {}
            assert part.in_shard or not optimizer.state.get(p), (
                f"state of {names[id(p)]}, of which nothing is here"
            )
            start = part.intra_param_start_idx if handle.uses_sharded_strategy else 0
            mine |= {f"{names[id(p)]}/{slot}": (shape, start, v.clone()) for slot, v in held.items()}
    return mine


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None], case: str, root: str) -> None:
    """One of ``CASES``, on each rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    CASES[case](say, root)
    dist.destroy_process_group()
    say(finished=True)


def sharded(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    model(torch.randn(5, 7)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def error_of(what: Callable[[], Any]) -> str:
    try:
        what()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def thawed(say: Callable[..., None], root: str) -> None:
    """A matrix of which one rank has nothing is frozen, trained from step 2 on, and given as trained at a resume."""
    texts: list[str] = []
    for steps, frozen in ((5, True), (5, False)):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        model[1].weight.requires_grad_(not frozen)
        model = sharded(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with (
            warnings.catch_warnings(record=True) as found,
            Checkpointer(root, model=model, optimizer=optimizer, base_every=99) as checkpointer,
        ):
            warnings.simplefilter("always")
            resumed = checkpointer.resume()
            texts = [str(each.message) for each in found]
            for number in range(resumed, steps):
                if number == 2:
                    model.requires_grad_(True)
                step(model, optimizer)
                checkpointer.step()
    say(resumed=resumed, told=[text for text in texts if "frozen" in text])


def unlike(say: Callable[..., None], root: str) -> None:
    """A rank of which FSDP1's books, as they are read, leave out an element."""
    model = sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        capture.flattened_of = lambda model: {
            key: replace(each, region=shortened(each.region)) for key, each in flattened_of(model).items()
        }
    said = error_of(lambda: Checkpointer(root, model=model, optimizer=optimizer).resume())
    say(refused=said, there=Path(root).exists())


def shortened(region: Stretch) -> Stretch:
    return region.rows(range(max(0, region.elements - 1)))


def gathered(say: Callable[..., None], root: str) -> None:
    """A base and a step inside of ``summon_full_params``."""
    model = sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer)
    checkpointer.resume()
    step(model, optimizer)
    checkpointer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        say(step=error_of(optimizer.step), save=error_of(checkpointer.save))  # a failure of save() stays
    checkpointer.close(save=False)


def written_back(say: Callable[..., None], root: str) -> None:
    """What is done while parameters are gathered is part of the run; that they are looked at is nothing."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    losses = []
    with Checkpointer(root, model=model, optimizer=optimizer, base_every=50) as checkpointer:
        checkpointer.resume()
        for number in range(6):
            step(model, optimizer)
            checkpointer.step()
            losses.append(checkpointer._survival.pace._losses)
            model.state_dict()
            with FullyShardedDataParallel.summon_full_params(model, writeback=number % 2 == 0):
                pass
            if number == 3:
                with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                    model.module[0].weight[4, 5] += 1
    before = digest(whole_state(model, optimizer))
    model, optimizer = made()
    with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
        say(resumed=checkpointer.resume(), again=digest(whole_state(model, optimizer)))
    say(before=before, losses=losses)


class Tied(nn.Module):
    """The same matrix twice, in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(7, 5, bias=False), nn.Linear(7, 5, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x) + self.out(x.relu())


class Scalar(nn.Module):
    """One element, of which all ranks but one have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Nested(nn.Module):
    """Three axes, of which a rank has parts of rows of rows; a layer that is wrapped by itself inside of one that is;
    one that is frozen."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.inner = wrap(nn.Sequential(wrap(nn.Linear(7, 5)), nn.Linear(5, 7)))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,aji->baj", self.frozen(self.inner(x)), self.cube)


ODD: dict[str, Callable[[Callable[[nn.Module], nn.Module]], nn.Module]] = {
    "tied": lambda wrap: Tied(),
    "scalar": lambda wrap: Scalar(),
    "nested": Nested,
    "tiny": lambda wrap: nn.Linear(7, 1, bias=False),
}


def come_back(case: str, say: Callable[..., None], root: str) -> None:
    """Train under FSDP1, then resume under FSDP1 and without it, from a base and records."""
    model = sharded(ODD[case](sharded))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(root, model=model, optimizer=optimizer, base_every=50) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            step(model, optimizer)
            checkpointer.step()
    say(before=digest(whole_state(model, optimizer)))
    steps = []
    for name, wrap in (("again", sharded), ("plain", lambda module: module)):
        model = wrap(ODD[case](wrap))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:
            steps.append(checkpointer.resume())
        say(**{name: digest(whole_state(model, optimizer) if is_wrapped(model) else plain(model, optimizer))})
    say(steps=steps)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """As ``whole_state``, of a model that is not wrapped."""
    found = {}
    for name, p in model.named_parameters():
        held = {"param": p.detach(), **optimizer.state.get(p, {})}
        found |= {f"{name}/{slot}": value for slot, value in held.items()}
    return dict(sorted(found.items()))


def books(say: Callable[..., None], root: str) -> None:
    """What is told of a model whose FSDP1 says, or does, something that is not so."""
    model = sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    flat = model._handle.flat_param
    infos = list(flat._shard_param_infos)
    held = next(number for number, info in enumerate(infos) if info.in_shard)
    further = infos[held]._replace(intra_param_start_idx=infos[held].intra_param_start_idx + 1)
    parameter, info = flat._params[held], flat._param_infos[held]

    def look() -> str:
        return error_of(lambda: LiveState(model, [optimizer]))

    told = {"as they are": look()}
    falsified: dict[str, dict[str, Any]] = {
        "another range": {"_shard_param_infos": (*infos[:held], further, *infos[held + 1 :])},
        "nothing here": {"_shard_param_infos": tuple(each._replace(in_shard=False) for each in infos)},
        "fewer shapes": {"_shapes": flat._shapes[:-1]},
        "fewer sizes": {"_numels": flat._numels[:-1]},
        "fewer ranges": {"_shard_param_infos": tuple(infos[:-1])},
        "another size": {"_numels": tuple(n + 1 for n in flat._numels)},
        "other padding": {"_numels_with_padding": tuple(n + 9 for n in flat._numels_with_padding)},
        "no padding": {"_is_padding_mask": None},
        "another parameter": {"_params": [nn.Parameter(each.detach().clone()) for each in flat._params]},
    }
    for what, changes in falsified.items():
        with changed(flat, changes):
            told[what] = look()
    with changed(parameter, {"data": parameter.data.clone()}):
        told["elsewhere"] = look()
    with changed(info.module, {info.param_name: nn.Parameter(parameter.detach())}):
        told["replaced"] = look()
    say(told=told)


@contextmanager
def changed(thing: Any, changes: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(thing, name) for name in changes}
    for name, value in changes.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


CASES: dict[str, Callable[[Callable[..., None], str], None]] = {
    "unlike": unlike,
    "thawed": thawed,
    "gathered": gathered,
    "written back": written_back,
    "books": books,
    **{case: lambda say, root, case=case: come_back(case, say, root) for case in ODD},
}
