"""Blocks that torch.compile has compiled are run as they were compiled; a compiled whole is refused by name."""

from __future__ import annotations

import shutil

import pytest
import torch

import holdfast
from holdfast.errors import ModelNotSupported
from support.grouped import grouped
from training import adamw, batches, decoder, differing, state_of, stored

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # tracing looks

STEPS, COUNT = 2, 2


class Counting:
    """A compiler that leaves graphs as they are, and counts how often they run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def wrapped(model, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


def plain_loop(compiled, backend):
    model = decoder(blocks=3)
    compiled(model, backend)
    optimizer, losses = adamw(model, fused=True), []
    for step in range(STEPS):
        total = 0.0
        for batch in batches(step, COUNT):
            loss = model(**batch)
            (loss / COUNT).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / COUNT)
    state = state_of(model, optimizer)
    return losses, {name.replace("._orig_mod", ""): value for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("schedule, recomputed", [("vertical", 1.0), ("horizontal", 1.0), ("vertical", 0.0)])
@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_compiled_blocks_equal_a_plain_loop_of_them(tmp_path, compiled, schedule, recomputed):
    losses, expected = plain_loop(compiled, "aot_eager")
    torch._dynamo.reset()
    model, backend = decoder(blocks=3), Counting()
    compiled(model, backend)
    options = {"dtype": "fp32", "schedule": schedule, "recomputed_fraction": recomputed}
    with holdfast.offload(model, adamw(model), tmp_path, **grouped(**options)) as engine:
        assert [engine.step(batches(step, COUNT)) for step in range(STEPS)] == losses
        # the last block runs once per micro-batch, the others once more if they are computed again
        assert backend.runs == STEPS * COUNT * (5 if recomputed else 3)
        before = backend.runs
        engine.evaluate(batches(5, COUNT))
        assert backend.runs == before + COUNT * 3
    assert differing(stored(tmp_path), expected) == []
    model(**batches(0, 1)[0])
    assert backend.runs == before + COUNT * 3 + 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_blocks_compiled_by_inductor_equal_a_plain_loop_of_them(tmp_path):
    from torch._inductor import metrics  # whose import warns

    losses, expected = plain_loop(in_place, "inductor")
    torch._dynamo.reset()
    model = decoder(blocks=3)
    in_place(model, "inductor")
    metrics.reset()
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        assert [engine.step(batches(step, COUNT)) for step in range(STEPS)] == losses
    assert metrics.generated_kernel_count
    assert differing(stored(tmp_path), expected) == []


def whole(model):
    return torch.compile(model, backend="eager")


def whole_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, whole_in_place])
def test_a_model_that_is_compiled_as_a_whole_is_told_to_compile_its_blocks(tmp_path, compiled):
    model = compiled(decoder(blocks=3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelNotSupported, match=r"the model is compiled .* 3 like blocks\.0"):
        holdfast.offload(model, optimizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_hook_on_a_block_compiled_in_place_is_refused(tmp_path):
    model = decoder(blocks=3)
    in_place(model, "eager")
    model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelNotSupported, match=r"blocks\.1 is compiled and has hooks"):
        holdfast.offload(model, adamw(model), tmp_path)
    assert not list(tmp_path.iterdir())
