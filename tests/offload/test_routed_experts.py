"""Frozen experts that are read where a token is routed to them: the bits of a plain loop, and no other reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput, ChunkCorrupt, ModelNotSupported
from training import adamw as adamw_of
from training import differing, stored

pytest.importorskip("transformers")

from routed_runs import (
    BLOCKS,
    EXPERT_BYTES,
    EXPERTS,
    adamw,
    micro_batches,
    mixture,
    offloaded,
    plain_loop,
    reads,
    train,
)

STEPS = 4


@pytest.fixture(scope="module")
def plain():
    return plain_loop(STEPS)


def read_bytes(engine):
    return engine.last["moved"]["ssd_read"].get("load_experts", 0)


# Bits


@pytest.mark.parametrize(
    "slots, options",
    [
        (1, {}),
        (3, {"placement": {"recomputed_fraction": 0.0}}),
        (4, {"schedule": "horizontal"}),
        (EXPERTS * BLOCKS, {"placement": {"params_on_host": 1.0, "embedding_and_head": "streamed"}}),
    ],
    ids=str,
)
def test_steps_have_every_bit_of_a_plain_loop(tmp_path, plain, slots, options):
    losses, engine = train(tmp_path, range(STEPS), slots, **options)
    assert losses == plain[0]
    assert differing(stored(tmp_path), plain[1]) == []
    assert engine.last["buffers"]["experts"] <= slots * EXPERT_BYTES


def test_a_killed_run_goes_on(tmp_path, plain):
    engine = offloaded(mixture(), tmp_path, 2)
    losses = [engine.step(micro_batches(step)) for step in range(2)]
    engine.wait()
    engine.give_up()
    resumed, engine = train(tmp_path, range(2, STEPS), 3)
    assert engine.resumed_from == 2
    assert losses + resumed == plain[0]
    assert differing(stored(tmp_path), plain[1]) == []


@pytest.mark.slow
def test_experts_leave_their_blocks_and_come_back_at_a_resume(tmp_path, plain):
    losses = []
    for step, slots in enumerate([None, 2, None, 5]):
        found, _ = train(tmp_path, range(step, step + 1), slots)
        losses += found
        names = [path.name for path in (tmp_path / "data").iterdir()]
        assert (slots is None) <= any(".frozen" in name for name in names)
    assert losses == plain[0]
    assert differing(stored(tmp_path), plain[1]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_compute_in_16_bits_whatever_they_are_stored_in(tmp_path, dtype):
    """Against the engine whose blocks have all of their experts."""
    options = {"precision": "bf16"}
    whole, _ = train(tmp_path / "whole", range(2), None, model=mixture(dtype), **options)
    found, _ = train(tmp_path / "routed", range(2), 2, model=mixture(dtype), **options)
    assert found == whole
    assert differing(stored(tmp_path / "routed"), stored(tmp_path / "whole")) == []


def test_evaluation_and_weights_are_those_of_the_model(tmp_path):
    model = mixture()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss = model.eval()(**micro_batches(0)[0]).loss.item()
    with offloaded(model, tmp_path, 2) as engine:
        assert engine.evaluate(micro_batches(0)[:1]) == loss
        assert differing(engine.state_dict(), expected) == []
    assert differing(dict(model.state_dict()), expected) == []


# Reads


def test_one_expert_at_a_time_is_read_when_it_is_used(tmp_path, plain):
    """An expert that is used again at once is not read again."""
    with offloaded(mixture(), tmp_path, 1) as engine:
        held = None
        for step in range(STEPS):
            engine.step(micro_batches(step))
            order = reads(plain[2][step])
            count = sum(a != b for a, b in pairwise([held, *order]))
            assert read_bytes(engine) == count * EXPERT_BYTES
            held = order[-1]


def test_experts_that_are_held_are_not_read_again(tmp_path, plain):
    """With room for all, each is read once, when the first token comes."""
    with offloaded(mixture(), tmp_path, EXPERTS * BLOCKS) as engine:
        seen = set()
        for step in range(STEPS):
            engine.step(micro_batches(step))
            new = {*reads(plain[2][step])} - seen
            assert read_bytes(engine) == len(new) * EXPERT_BYTES
            seen |= new
    assert 0 < len(seen) < EXPERTS * BLOCKS


def test_passes_without_gradients_keep_what_the_next_micro_batch_begins_with(tmp_path):
    """The same micro-batch once and three times, with room for some of its experts."""
    (batch,) = micro_batches(0, count=1, length=12)
    counts = []
    for times in (1, 3):
        with offloaded(mixture(), tmp_path / str(times), 6) as engine:
            engine.evaluate([batch] * times)
            counts.append(engine.traffic()["ssd_read", "load_experts"] // EXPERT_BYTES)
    assert counts[0] > 6 * BLOCKS
    assert counts[0] < counts[1] < 3 * counts[0] - BLOCKS


def test_an_expert_without_tokens_is_not_looked_at(tmp_path, plain):
    """Its bytes may be damaged; those of one with tokens are refused."""
    hit = {expert for block, expert in reads(plain[2][0]) if block == 1}
    for used in (False, True):
        engine = offloaded(mixture(), tmp_path / str(used), 2)
        file = engine._run.blocks[1].expert_file
        part = file.parts(next(e for e in range(EXPERTS) if (e in hit) == used))[1]
        with (tmp_path / str(used) / "data" / f"{file.name}.0.safetensors").open("r+b") as opened:
            opened.seek(part.start + part.skip)
            opened.write(b"damaged")
        if used:
            with pytest.raises(
                ChunkCorrupt, match=r"'model\.layers\.1\.mlp\.experts\.down_proj/param' fails"
            ):
                engine.step(micro_batches(0))
        else:
            assert engine.step(micro_batches(0)) == plain[0][0]
            engine.wait()
        engine.give_up()


def test_memory_is_that_of_the_slots(tmp_path):
    """The prediction has them beside two blocks without their experts."""
    sample = {"sample": micro_batches(0)[0], "micro_batches": 2}
    with offloaded(mixture(), tmp_path, 2, **sample) as engine:
        memory = engine._plan.memory.at("host")
        copies = [unit.copy_bytes for unit in engine._run.blocks]
    assert memory["experts"] == 2 * EXPERT_BYTES
    assert memory["params"] == 2 * copies[0] < EXPERTS * EXPERT_BYTES


# Refusals


class Looped(nn.Module):
    """Experts of one's own: ``use`` says what a block does with the parameter of all experts."""

    def __init__(self, use):
        super().__init__()
        self.num_experts, self.use = 4, use
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8, requires_grad=False)
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.gate(self.use(self.weight, x))


def looped(use):
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleList([Looped(use), Looped(use)]), nn.Linear(8, 1))


def step(tmp_path, use):
    model = looped(use)
    blocks = [*model[0]]
    model.forward = lambda x: model[1](blocks[1](blocks[0](x))).mean()
    options = {"precision": "fp32", "placement": holdfast.Placement(expert_slots=2)}
    with holdfast.offload(model, adamw_of(model), tmp_path, blocks=blocks, **options) as engine:
        return engine.step([{"x": torch.ones(2, 8)}])


def changed(weight, x):
    weight[1].mul_(2)
    return x @ weight[1]


def changed_unseen(weight, x):
    weight[1].data.mul_(2)
    return x @ weight[1]


def changed_and_left(weight, x):
    weight[1].data[3].mul_(2)
    return x @ weight[1] @ weight[0] @ weight[2] @ weight[3]


@pytest.mark.parametrize(
    "use, error",
    [
        (
            lambda weight, x: x @ weight.sum(0),
            r"0\.0\.weight was used in 0\.0: its experts are read one by one",
        ),
        (lambda weight, x: x @ weight[1:3][0], "its experts are read one by one"),
        *((use, r"changed expert 1 of 0\.0 in place") for use in (changed, changed_unseen, changed_and_left)),
    ],
)
def test_a_block_that_takes_more_than_one_expert_or_changes_one_is_refused(tmp_path, use, error):
    with pytest.raises(ModelNotSupported, match=error):
        step(tmp_path, use)


def test_rows_that_the_models_code_keeps_stay_what_they_are(tmp_path):
    """More than there are slots: they take memory, and no other expert's numbers come into it."""

    def kept(weight, x):
        rows = [weight[expert] for expert in (0, 1, -1, 2)]
        return x @ rows[0] @ rows[1] @ rows[2] @ rows[3]

    model = looped(kept)
    with torch.no_grad():
        expected = float(model[1](model[0][1](model[0][0](torch.ones(2, 8)))).mean())
    assert step(tmp_path, kept) == expected


def test_rows_of_a_detached_parameter_are_those_of_the_parameter(tmp_path):
    rows = step(tmp_path / "plain", lambda weight, x: x @ weight[1])
    assert step(tmp_path / "detached", lambda weight, x: x @ weight.detach()[1]) == rows
    assert step(tmp_path / "data", lambda weight, x: x @ weight.data[1]) == rows


def test_what_cannot_be_split_is_refused_before_anything_is_written(tmp_path):
    together = mixture()
    together.set_experts_implementation("grouped_mm")
    trained = mixture()
    trained.requires_grad_(True)
    for model, kind, error in (
        (together, ModelNotSupported, r"'grouped_mm', which takes all experts at once.*set_experts_impl"),
        (trained, BadInput, "Experts that are trained come with their block"),
    ):
        with pytest.raises(kind, match=error):
            offloaded(model, tmp_path, 2)
    with pytest.raises(BadInput, match="expert_slots = 0 must be at least 1"):
        offloaded(mixture(), tmp_path, 0)
    with pytest.raises(BadInput, match="expert_slots = 2 is not of MeZO"):
        model = mixture()
        optimizer = holdfast.optim.MeZO([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        holdfast.offload(model, optimizer, tmp_path, placement=holdfast.Placement(expert_slots=2))
    assert not [*tmp_path.iterdir()]
    assert adamw(trained).param_groups  # nothing was taken from the scripts' models
