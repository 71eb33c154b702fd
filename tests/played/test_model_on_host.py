"""A model in host memory computes on a device that has room for one of its blocks."""

from __future__ import annotations

import pytest
import torch

from holdfast.integrations.out_of_core.model_on_host import computing_on
from holdfast.offload.model.blocks import find_blocks
from played_device import HERE, played  # noqa: F401
from training import batches, decoder

pytestmark = pytest.mark.usefixtures("played")


def on_device(module):
    return any(tensor.device.type == HERE.type for tensor in [*module.parameters(), *module.buffers()])


def test_one_block_at_a_time_comes_to_the_device():
    model, batch = decoder(blocks=3).eval(), batches(0, 1)[0]
    blocks, own, seen = find_blocks(model).modules, dict(model.named_parameters()), []
    expected = model(**batch)
    for block in blocks:
        block.register_forward_hook(lambda *_: seen.append([on_device(each) for each in blocks]))
    with torch.no_grad(), computing_on(HERE, model):
        assert on_device(model) and not any(map(on_device, blocks))
        found = model(**{name: value.to(HERE) for name, value in batch.items()})
    assert seen == [[True, False, False], [False, True, False], [False, False, True]]
    assert torch.equal(found.to("cpu"), expected)
    assert all(each is own[name] for name, each in model.named_parameters()) and not on_device(model)


def test_a_model_whose_block_fails_is_on_the_host_again():
    model, batch = decoder(blocks=3), batches(0, 1)[0]

    def fail(*_):
        raise KeyboardInterrupt

    find_blocks(model).modules[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), computing_on(HERE, model):
        model(**{name: value.to(HERE) for name, value in batch.items()})
    assert not on_device(model)
