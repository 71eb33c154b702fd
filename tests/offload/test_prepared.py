"""Models that another library has prepared are refused by name, before anything is written, or trained as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import holdfast
from holdfast.errors import BadInput, ModelNotSupported
from support.grouped import grouped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def opened(directory, model, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return holdfast.offload(model, optimizer, directory, **grouped(**{"dtype": "fp32", **options}))


def offloaded_by_accelerate(model):
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


def spread_by_accelerate(model):
    hooks = pytest.importorskip("accelerate.hooks")
    model.hf_device_map = {"blocks.0": 0, "blocks.1": 1}
    hooks.add_hook_to_module(model.blocks[1], hooks.AlignDevicesHook(execution_device="cpu"))
    return model


def partitioned(model):
    """With the attributes that deepspeed.zero.Init sets."""
    for parameter in model.parameters():
        parameter.ds_id, parameter.ds_tensor, parameter.data = 0, parameter.data, torch.empty(0)
    return model


def scripted_blocks(model):
    model.blocks = nn.ModuleList(torch.jit.trace(block, torch.ones(1, 4)) for block in model.blocks)
    return model


class Doubled(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 2 * result if func is nn.functional.linear else result


def of_another_class(model):
    model.blocks[1].inner.weight = Doubled(model.blocks[1].inner.weight.detach())
    return model


def expanded(model):
    model.blocks[1].inner.bias = nn.Parameter(torch.ones(1).expand(8))
    return model


def inside(change):
    def of(model):
        change(model.blocks[1])
        return model

    return of


def with_statistics(block):
    block.inner = nn.Sequential(block.inner, nn.BatchNorm1d(8))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (offloaded_by_accelerate, r"blocks\.0\.inner .* dispatched by accelerate .* without device_map"),
        (spread_by_accelerate, "spread over several places by accelerate"),
        (partitioned, r"blocks\.0\.inner\.weight is partitioned by DeepSpeed ZeRO-3"),
        (scripted_blocks, r"blocks\.0 .* scripted or traced"),
        (of_another_class, r"blocks\.1\.inner\.weight is of a class of its own"),
        (expanded, r"blocks\.1\.inner\.bias is expanded"),
        (inside(with_statistics), r"blocks\.1\.inner\.1 \(BatchNorm1d\) changes its buffers"),
        (inside(lambda block: nn.utils.spectral_norm(block.inner)), r"blocks\.1\.inner .* changes its buffers"),
        (inside(lambda block: parametrizations.spectral_norm(block.inner)), "changes its buffers"),
        (inside(lambda block: nn.utils.weight_norm(block.inner)), "computes its weight in a hook"),
        (inside(lambda block: prune.l1_unstructured(block.inner, "weight", 0.5)), "prune.remove"),
    ],
)  # fmt: skip
def test_prepared_models_are_refused_first(tmp_path, prepare, said):
    with pytest.raises(ModelNotSupported, match=said):
        opened(tmp_path / "run", prepare(net()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("prepare", [offloaded_by_accelerate, partitioned])
def test_checkpointer_refuses_parameters_elsewhere(tmp_path, prepare):
    model = prepare(net())
    with pytest.raises(ModelNotSupported, match=r"dispatched by accelerate|partitioned by DeepSpeed"):
        holdfast.Checkpointer(
            tmp_path / "run", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
        )
    assert not (tmp_path / "run").exists()


def test_partly_empty_model_is_refused(tmp_path):
    """Unless it was built so, or is said what to begin with."""
    model = net()
    model.blocks[1].to("meta")
    with pytest.raises(BadInput, match=r"blocks\.1\.inner\.weight is on meta .* 4 others have theirs"):
        opened(tmp_path / "run", model)
    assert not (tmp_path / "run").exists()
    opened(tmp_path / "init", model, init=lambda module: module.reset_parameters()).close()
    model = net()
    with holdfast.empty_parameters():
        model.blocks[1] = Block()
    opened(tmp_path / "empty", model).close()


@pytest.mark.parametrize(
    "prepare",
    [
        inside(lambda block: parametrizations.weight_norm(block.inner)),
        inside(lambda block: parametrizations.orthogonal(block.outer)),
        inside(lambda block: block.register_forward_pre_hook(lambda _, args: (args[0].to("cpu"),))),
        nn.DataParallel,
    ],
    ids=["weight_norm", "orthogonal", "moving hook", "DataParallel"],
)
def test_prepared_models_train_as_plain_loops(tmp_path, prepare):
    expected = prepare(net())
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    for x in inputs:
        expected(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = prepare(net())
    with opened(tmp_path / "run", model) as engine:
        for x in inputs:
            engine.step([(x,)])
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
