"""Parameters that are not contiguous compute, are updated and come back as in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ModelNotSupported


class Net(nn.Module):
    """Of sizes of which no power of two is a multiple; its head is transposed, its blocks are channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(13, 13, (3, 5), padding=(1, 2)) for _ in range(3))
        self.blocks.to(memory_format=torch.channels_last)
        self.head = nn.Linear(7, 211)
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def built() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 13, 5, 7, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_other_layouts_equal_plain_loops(tmp_path, clip_norm):
    expected, losses = built(), []
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        every = [expected(x) for x in inputs(step)]
        for loss in every:
            (loss / 2).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in every) / 2)
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32", clipping=clip_norm) as engine:
        assert [engine.step([(x,) for x in inputs(step)]) for step in range(3)] == losses
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted), name
        assert found.stride() == wanted.stride()


def test_whole_matrix_updates_need_contiguous_parameters(tmp_path):
    model = built()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    with pytest.raises(ModelNotSupported, match=r"blocks\.0\.weight is not contiguous .*\.contiguous\(\)"):
        holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32")
    assert not (tmp_path / "run").exists()
