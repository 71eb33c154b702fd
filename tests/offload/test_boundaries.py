"""What a model hands from block to block comes out with the bits of a plain loop, or is refused by name."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast.errors import BlockInputChanged, ModelNotSupported
from holdfast.io.buffers import BufferPool
from holdfast.offload import recomputation
from holdfast.offload.memory.block_states import as_tensor
from holdfast.offload.memory.residency import Residency
from holdfast.offload.memory.transfer_pool import unpacked
from holdfast.offload.runtime import InputScratch
from support.grouped import grouped
from training import CONTEXT, VOCABULARY, batches, differing, state_of, stored

WIDTH, STEPS = 16, 3
SETTINGS = {
    "ssd": {"activations_on_host": 0.0},
    "host": {"params_on_host": 1.0, "optimizer_on_host": 1.0},
    "horizontal": {"schedule": "horizontal", "activations_on_host": 0.0},
}


class Layer(nn.Module):
    """A block adds something to what it is given; each model below gives it other things."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    layer = Layer
    layers = 4

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.layer() for _ in range(self.layers))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        return self.loss(self.run(self.embed(tokens), tokens), targets)

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x, targets):
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class KeywordsAndContainers(Model):
    """Keywords, a dict of several float outputs, None, a number, and a mask that is passed through."""

    class layer(Layer):
        def forward(self, x, *, other, scale, mask):
            y = x + self.linear(self.norm(x)) * scale * mask
            return {"x": y, "other": (other + torch.tanh(self.linear(x)), None, 3), "mask": mask}

    def run(self, x, tokens):
        out = {"x": x, "other": (torch.zeros_like(x), None, 3), "mask": (tokens > 3).float()[..., None]}
        for block in self.blocks:
            out = block(out["x"], other=out["other"][0], scale=0.5, mask=out["mask"])
        return out["x"] + out["other"][0]


class CodeBetweenBlocks(Model):
    def __init__(self):
        super().__init__()
        self.between = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(self.layers - 1)})

    def run(self, x, tokens):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if str(index) in self.between:
                x = torch.tanh(self.between[str(index)](x)) * 1.5
        return x


class TensorOfThePrologueInEveryBlock(Model):
    class layer(Layer):
        def forward(self, x, bias):
            return x + self.linear(self.norm(x) + bias) * torch.sigmoid(bias)

    def run(self, x, tokens):
        bias = self.bias_of(x)
        for block in self.blocks:
            x = block(x, bias)
        return x

    def bias_of(self, x):
        return torch.tanh(self.bias) * 2


class ParameterInEveryBlock(TensorOfThePrologueInEveryBlock):
    def bias_of(self, x):
        return self.bias


class SkipConnections(Model):
    """The outputs of the first blocks are inputs of the last ones, used twice in them."""

    class layer(Layer):
        def forward(self, x, skip=None):
            if skip is not None:
                x = x * torch.sigmoid(skip) + 0.5 * skip
            return x + self.linear(self.norm(x))

    def run(self, x, tokens):
        kept = []
        for index, block in enumerate(self.blocks):
            x = block(x) if index < 2 else block(x, kept[self.layers - 1 - index])
            kept.append(x)
        return x


class EverythingInTheEpilogue(Model):
    """The prologue's tensor and every block's output."""

    def run(self, x, tokens):
        first, outputs = x, []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return x + first * 0.1 + sum(outputs) * 0.1


class OneBlock(EverythingInTheEpilogue):
    layers = 1


class TwoBlocks(EverythingInTheEpilogue):
    layers = 2


class SameTensorTwice(Model):
    class layer(Layer):
        def forward(self, x, y):
            assert x is y
            return x + self.linear(self.norm(y))

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(x, x)
        return x


class InputReturnedAsItIs(SkipConnections):
    """A block hands its input on beside its output."""

    class layer(Layer):
        def forward(self, x, skip):
            return x + self.linear(self.norm(x)), skip + 0.5 * x if self.training else skip, x

    def run(self, x, tokens):
        skip = x
        for block in self.blocks:
            x, skip, before = block(x, skip)
        return x + skip + before


class FrozenBeginning(EverythingInTheEpilogue):
    def __init__(self):
        super().__init__()
        for part in (self.embed, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)


class FrozenBetween(EverythingInTheEpilogue):
    def __init__(self):
        super().__init__()
        for part in (self.blocks[1], self.blocks[3], self.head):
            part.requires_grad_(False)


class OddParameters(Model):
    """No elements, one element, no gradient, and a buffer of the block that stays as it is."""

    class layer(Layer):
        def __init__(self):
            super().__init__()
            self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
            self.unused = nn.Linear(3, 5)
            self.register_buffer("table", torch.arange(WIDTH).float())

        def forward(self, x):
            return super().forward(x) * self.scale + self.table * 0.01 + self.none.sum()


class NothingButBlocks(Model):
    """No parameter outside of the blocks, as in a part of a pipeline."""

    def __init__(self):
        super().__init__()
        del self.embed, self.bias, self.head

    def forward(self, tokens, targets):
        x = F.one_hot(tokens, WIDTH + 1)[..., :WIDTH].float()
        return (self.run(x, tokens).mean(-1) - targets / VOCABULARY).square().mean()


class MadeIntegers(Model):
    """A block returns integers, which have no gradient."""

    class layer(Layer):
        def forward(self, x, counts):
            return super().forward(x) * (1 + counts[..., None] * 0.01), counts + 1

    def run(self, x, tokens):
        counts = tokens
        for block in self.blocks:
            x, counts = block(x, counts)
        return x


class ComplexTensors(Model):
    """Complex activations, beside an odd number of half-precision ones."""

    class layer(Layer):
        def forward(self, half, z):
            y = super().forward(z.real + half.float().mean())
            return (half * 1.5 + y.mean()).bfloat16(), torch.complex(y, torch.tanh(z.imag + 0.1 * y))

    def run(self, x, tokens):
        half, z = x[0, 0, :3].bfloat16(), torch.complex(x, torch.zeros_like(x))
        for block in self.blocks:
            half, z = block(half, z)
        return z.real + z.imag + half.float().mean()


class SharedMapping(Model):
    """Blocks fill a mapping, replace an entry and read it; the code after them reads it, too."""

    class layer(Layer):
        def forward(self, x, shared, *, index):
            if index == 0:
                shared["first"] = torch.tanh(self.linear(x)), torch.sigmoid(x)
            elif index == 1:
                shared["second"] = x * 2
            elif index == 2:
                first, gate = shared["first"]
                x = x + first * gate
                shared["first"] = first * 0.5, gate
            else:
                x = x + shared["first"][0] * shared["second"]
            return super().forward(x)

    def run(self, x, tokens):
        shared = UserDict(scale=torch.tensor(0.5))
        for index, block in enumerate(self.blocks):
            x = block(x, shared, index=index)
        return x + shared["second"] * shared["scale"] + shared["first"][1]


class PartsOfAPrologueTensor(Model):
    """Each block gets its part of one tensor, and code between blocks adds another; the epilogue reads both.

    Parts with gaps are dense after a detour over the SSD, so blocks compute with them only what is rounded correctly:
    ``sigmoid`` has other last bits with other strides on some processors.
    """

    class layer(Layer):
        def forward(self, x, part):
            return super().forward(x * (1 + part * part))

    def run(self, x, tokens):
        parts = torch.tanh(self.bias[:, None] * torch.arange(1.0, self.layers + 1) + x[0, 0, :, None])
        added = torch.sin(self.bias * 3) * x.mean()
        for index, block in enumerate(self.blocks):
            x = block(x, parts[:, index]) + added * (index % 2)
        return x + parts.mean() * added


MODELS = [
    KeywordsAndContainers, CodeBetweenBlocks, TensorOfThePrologueInEveryBlock, ParameterInEveryBlock,
    SkipConnections, EverythingInTheEpilogue, OneBlock, TwoBlocks, SameTensorTwice, InputReturnedAsItIs,
    FrozenBeginning, FrozenBetween, OddParameters, NothingButBlocks, MadeIntegers,
    ComplexTensors, SharedMapping, PartsOfAPrologueTensor,
]  # fmt: skip


def build(kind):
    torch.manual_seed(0)
    return kind()


def mean(micro_batches):
    return [1 / len(micro_batches)] * len(micro_batches)


def plain_loop(kind, data, shares):
    """The ordinary loop; ``shares`` are the weights of a step's losses."""
    model = build(kind)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(STEPS):
        total = 0.0
        for batch, share in zip(data(step), shares(data(step)), strict=True):
            loss = model(**batch)
            (loss * share).backward()
            total += loss.item() * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, state_of(model, optimizer)


def check(directory, kind, data=lambda step: batches(step, 2), shares=mean, **options):
    losses, expected = plain_loop(kind, data, shares)
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.offload(
        model, optimizer, directory, **grouped(dtype="fp32", clip_norm=0.5, **options)
    ) as engine:
        assert [engine.step(data(step)) for step in range(STEPS)] == losses
    assert differing(stored(directory), expected) == []


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_bit_equals_a_plain_loop(tmp_path, kind, setting):
    check(tmp_path, kind, **SETTINGS[setting])


class Encoder(nn.Module):
    """PyTorch's own encoder layers, whose kernels depend on what requires grad."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 3).layers

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("setting", SETTINGS)
def test_torchs_own_encoder_layers_have_every_bit_in_evaluations_too(tmp_path, setting):
    torch.manual_seed(0)
    model = Encoder()
    twin = deepcopy(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(3):
        made = [model(**batch) for batch in batches(step, 2)]
        for loss in made:
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made) / 2)
    model.eval()
    with torch.no_grad():
        evaluated = sum(model(**batch).item() for batch in batches(3, 2)) / 2
    with holdfast.offload(
        twin,
        torch.optim.AdamW(twin.parameters(), lr=1e-2),
        tmp_path,
        **grouped(dtype="fp32", **SETTINGS[setting]),
    ) as engine:
        assert [engine.step(batches(step, 2)) for step in range(3)] == losses
        assert engine.evaluate(batches(3, 2)) == evaluated
    assert differing(stored(tmp_path), state_of(model, optimizer)) == []


def of_many_lengths(step):
    """Four micro-batches, each with its own number of rows and tokens, other ones in every step."""
    return [
        {name: tensor[: 1 + (m + step) % 2, : 3 + (step + 2 * m) % 6] for name, tensor in batch.items()}
        for m, batch in enumerate(batches(step, 4))
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_micro_batches_may_differ_in_length(tmp_path, setting):
    check(tmp_path, KeywordsAndContainers, of_many_lengths, **SETTINGS[setting])


def test_inputs_on_the_ssd_may_grow_from_step_to_step(tmp_path):
    def growing(step):
        return [{n: t[:, : 2 + 3 * step] for n, t in batch.items()} for batch in batches(step, 2, rows=150)]

    check(tmp_path, Model, growing, **SETTINGS["ssd"])


@pytest.mark.slow
def test_inputs_that_grow_take_few_files_and_no_more_than_twice_their_size(tmp_path):
    model = build(Model)
    options = {"dtype": "fp32", "activations_on_host": 0.0, "commit_every": 0}
    with holdfast.offload(
        model, torch.optim.AdamW(model.parameters()), tmp_path, **grouped(**options)
    ) as engine:
        for rows in range(8, 400, 8):
            engine.step(batches(0, 2, rows=rows))
            found = [path.stat().st_size for path in tmp_path.glob("scratch/inputs-*")]
            assert len(found) == 1
            assert sum(found) <= 2 * 3 * 2 * (rows * CONTEXT * WIDTH * 4)


def test_room_for_inputs_is_given_up_when_nothing_refers_to_it():
    def opened(nbytes):
        files.append(SimpleNamespace(nbytes=nbytes))
        return files[-1]

    files = []
    room = InputScratch(opened, files.remove)
    first = [room.slot((0, m), 10, more=3) for m in range(3)]
    assert [(s.nbytes, offset) for s, offset in first] == [(30, 0), (30, 10), (30, 20)]
    assert room.slot((0, 1), 11, more=3)[0].nbytes == 60
    assert [s.nbytes for s in files] == [30, 60]  # two inputs are still in the first
    assert room.slot((0, 0), 15)[1] == 20
    assert room.slot((0, 2), 5) == first[2]
    assert room.slot((0, 2), 12)[1] == 40
    assert [s.nbytes for s in files] == [60]
    assert room.slot((0, 1), 100)[0].nbytes == 100
    assert [s.nbytes for s in files] == [60, 100]


class OtherLayouts(Model):
    """What flows is no contiguous tensor: transposed, so dense, on the way in and out of every block."""

    class layer(Layer):
        def __init__(self):
            super().__init__()
            self.mix, self.layouts = nn.Linear(CONTEXT, CONTEXT), set()

        def forward(self, x):
            self.layouts.add(x.stride())
            y = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
            return y.transpose(1, 2).contiguous().transpose(1, 2)

    def run(self, x, tokens):
        return super().run(x.transpose(0, 1).contiguous().transpose(0, 1), tokens)


@pytest.mark.parametrize("setting", SETTINGS)
def test_tensors_keep_their_layout_wherever_they_wait(tmp_path, setting):
    def data(step):
        return batches(step, 2, rows=40)

    models = []

    class Remembered(OtherLayouts):
        def __init__(self):
            super().__init__()
            models.append(self)

    check(tmp_path, Remembered, data, **SETTINGS[setting])
    plain, offloaded = ([block.layouts for block in model.blocks] for model in models)
    assert offloaded == plain
    assert plain[1] == {(WIDTH * CONTEXT, 1, CONTEXT)}


@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (1, 0, 2), "gaps", "expanded"])
def test_a_packed_tensor_has_the_layout_of_a_clone(layout):
    tensor = torch.randn(3, 4, 5)
    if layout == "gaps":
        tensor = tensor.transpose(0, 2)[:, ::2]
    elif layout == "expanded":
        tensor = tensor[:, :1].expand(3, 4, 5)
    else:
        tensor = tensor.permute(layout)
    residency = Residency(BufferPool(), [], SimpleNamespace(grad_bytes=0), torch.device("cpu"))
    half = torch.randn(3).bfloat16()
    buffer, forms = residency.pack_input([half, tensor, half])
    packed = unpacked(as_tensor(buffer), forms)
    assert [t.stride() for t in packed] == [t.clone().stride() for t in (half, tensor, half)]
    assert all(map(torch.equal, packed, (half, tensor, half)))


def test_losses_can_be_weighted_by_their_target_tokens(tmp_path):
    def data(step):
        found = of_many_lengths(step)
        found[0]["targets"] = found[0]["targets"].masked_fill(found[0]["tokens"] > 12, -100)
        return found

    def by_tokens(micro_batches):
        counts = [int((batch["targets"] != -100).sum()) for batch in micro_batches]
        return [count / sum(counts) for count in counts]

    check(tmp_path, Model, data, by_tokens, normalize="tokens")


def test_a_parameter_of_several_blocks_differs_by_the_order_of_its_sum_alone(tmp_path):
    """A plain loop adds up a micro-batch's uses first; out of core, each block's use is added as it comes."""

    def shared():
        model = build(Model)
        for block in model.blocks[1:]:
            block.norm.weight = model.blocks[0].norm.weight
        return model

    expected, found = {}, {}
    for count in (1, 3):
        model = shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        for batch in batches(0, count):
            (model(**batch) / count).backward()
        optimizer.step()
        expected[count] = state_of(model, optimizer)
        model = shared()
        with holdfast.offload(
            model, torch.optim.SGD(model.parameters(), lr=1.0), tmp_path / str(count), precision="fp32"
        ) as engine:
            engine.step(batches(0, count))
        found[count] = stored(tmp_path / str(count))
    assert differing(found[1], expected[1]) == []
    name = "blocks.0.norm.weight/param"
    assert differing(found[3], expected[3]) in ([], [name])
    assert (found[3][name] - expected[3][name]).abs().max() <= 2 * 12 * torch.finfo(torch.float32).eps


# What is refused


def changes_x(block, x, mask, items, notes):
    x.mul_(2)


def changes_a_mask(block, x, mask, items, notes):
    mask += 1


def lengthens_a_list(block, x, mask, items, notes):
    items.append(x)


def replaces_an_item(block, x, mask, items, notes):
    items[0] = items[0] + 1


def sets_an_attribute(block, x, mask, items, notes):
    notes.count += 1


def replaces_deep_inside(block, x, mask, items, notes):
    notes.parts[0].tensor = torch.ones(2)


def changes_deep_inside(block, x, mask, items, notes):
    notes.parts[0].tensor.add_(1)


def changes_a_buffer(block, x, mask, items, notes):
    block.norm.seen.add_(1)


CHANGES = {
    changes_x: r"blocks\.1 changed its input argument \[0\] ",
    changes_a_mask: r"blocks\.1 changed its input mask ",
    lengthens_a_list: r"blocks\.1 changed its input items\[1\] ",
    replaces_an_item: r"blocks\.1 changed its input items\[0\] ",
    sets_an_attribute: r"blocks\.1 changed its input notes ",
    replaces_deep_inside: r"blocks\.1 changed its input notes ",
    changes_deep_inside: r"blocks\.1 changed its input notes ",
    changes_a_buffer: r"blocks\.1 changed its buffer norm\.seen ",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_block_that_changes_what_it_is_given_is_refused_by_name(tmp_path, change):
    class Changing(Model):
        class layer(Layer):
            def __init__(self):
                super().__init__()
                self.norm.register_buffer("seen", torch.zeros(1))

            def forward(self, x, *, mask, items, notes):
                if self is model.blocks[1]:
                    change(self, x, mask, items, notes)
                return super().forward(x)

        def run(self, x, tokens):
            notes = SimpleNamespace(parts=[SimpleNamespace(tensor=torch.zeros(2))], count=0)
            mask, items = torch.ones(2), [1]
            for block in self.blocks:
                x = block(x, mask=mask, items=items, notes=notes)
            return x

    model = build(Changing)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(BlockInputChanged, match=CHANGES[change]) as caught:
        engine.step(batches(0, 2))
    assert caught.value.exit_code == 2


class ChangesAnObjectBetweenBlocks(Model):
    class layer(Layer):
        def forward(self, x, context):
            return super().forward(x) * (1 + context.layer)

    def run(self, x, tokens):
        context = SimpleNamespace(layer=0)
        for context.layer, block in enumerate(self.blocks):
            x = block(x, context)
        return x


class ChangesATensorBetweenBlocks(Model):
    class layer(Layer):
        def forward(self, x, *, notes):
            return super().forward(x) * torch.cos(notes["depth"].float())

    def run(self, x, tokens):
        depth = torch.zeros(1, dtype=torch.int64)
        for block in self.blocks:
            x = block(x, notes={"depth": depth})
            depth += 1
        return x


CHANGED_BETWEEN = {
    ChangesAnObjectBetweenBlocks: r"input argument \[1\] of blocks\.2 was changed after the block ran and before",
    ChangesATensorBetweenBlocks: r"input notes\['depth'\] of blocks\.2 was changed after the block ran",
}


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("kind", CHANGED_BETWEEN)
def test_an_input_that_changes_between_a_blocks_two_runs_is_refused_by_name(tmp_path, kind, schedule):
    model = build(kind)
    engine = holdfast.offload(
        model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32", schedule=schedule
    )
    with pytest.raises(BlockInputChanged, match=CHANGED_BETWEEN[kind]):
        engine.step(batches(0, 2))


class ChangesATensorLate(ChangesATensorBetweenBlocks):
    late = False

    def run(self, x, tokens):
        if self.late:
            return super().run(x, tokens)
        for depth, block in enumerate(self.blocks):
            x = block(x, notes={"depth": torch.tensor([depth])})
        return x


def test_kept_graph_does_not_hide_a_change(tmp_path, monkeypatch):
    """The free memory decides on what runs twice, and not on what is refused."""
    monkeypatch.setattr(recomputation, "most_process_bytes", lambda: 0)  # earlier tests may have held much
    model = build(ChangesATensorLate)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    for step in range(2):
        engine.step(batches(step, 2))
    assert engine.last["recomputed_fraction"] == 0.0
    model.late = True
    with pytest.raises(BlockInputChanged, match=r"input notes\['depth'\] of blocks\.2 was changed"):
        engine.step(batches(2, 2))


def test_a_model_that_changes_a_blocks_output_in_place_is_told_what_to_write_instead(tmp_path):
    class InPlace(Model):
        def run(self, x, tokens):
            for block in self.blocks:
                x = block(x)
                x += self.bias
            return x

    model = build(InPlace)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(BlockInputChanged, match=r"write x = x \+ y instead of x \+= y"):
        engine.step(batches(0, 1))


@dataclass
class State:
    x: torch.Tensor


@dataclass(slots=True)
class Slots:
    parts: list


class TakesAnObject(Model):
    class layer(Layer):
        def forward(self, state):
            return super().forward(state.x)

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(State(x))
        return x


class ReturnsAnObject(Model):
    class layer(Layer):
        def forward(self, x):
            return {"out": Slots([None, super().forward(x)])}

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(x)["out"].parts[1]
        return x


HIDDEN = {
    TakesAnObject: r"State\.x in the input of blocks\.0 is a tensor with a gradient inside an object",
    ReturnsAnObject: r"Slots\.parts\[1\] in the output of blocks\.3 is a tensor with a gradient inside",
}


class DrawsFromItsOwnGenerator(Model):
    class layer(Layer):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return super().forward(x) * torch.rand((), generator=self.generator)


def test_a_block_with_another_output_when_it_runs_again_is_refused(tmp_path):
    model = build(DrawsFromItsOwnGenerator)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(ModelNotSupported, match=r"blocks\.2 has another output when it runs again"):
        engine.step(batches(0, 2))


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_gradient_that_hides_in_an_object_is_refused_by_name(tmp_path, kind):
    model = build(kind)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(ModelNotSupported, match=HIDDEN[kind]):
        engine.step(batches(0, 2))


class ObjectWithoutGradients(Model):
    """What an object holds may be anything that has no gradient, or a parameter."""

    class layer(Layer):
        def forward(self, x, state):
            return x + self.linear(self.norm(x)) * state.x[0].float()[..., None] + state.x[1]

    def run(self, x, tokens):
        for block in self.blocks:
            x = block(x, State((tokens, self.bias)))
        return x


def test_an_object_may_hold_tensors_without_gradients_and_parameters(tmp_path):
    check(tmp_path, ObjectWithoutGradients, lambda step: batches(step, 1))


class BlocksKeepALoss(Model):
    """An auxiliary loss of each block, which the model adds up after them."""

    class layer(Layer):
        def forward(self, x):
            y = super().forward(x)
            self.norm.kept = [y.square().mean()]
            return y

    def loss(self, x, targets):
        return super().loss(x, targets) + sum(block.norm.kept[0] for block in self.blocks)


class PrologueSetsAMask(Model):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) * model_of_masks.mask

    def run(self, x, tokens):
        global model_of_masks
        model_of_masks, self.mask = self, (tokens > 3).float()[..., None]
        return super().run(x, tokens)


class PrologueSetsMasksOfBlocks(Model):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) * self.mask

    def run(self, x, tokens):
        for block in self.blocks:
            block.mask = (tokens > 3).float()[..., None]
        return super().run(x, tokens)


class KeepsThePrologue(Model):
    def run(self, x, tokens):
        self.first = x
        return super().run(x, tokens) + self.first


@pytest.mark.parametrize(
    "kind, count, said",
    [
        (BlocksKeepALoss, 1, r"attribute blocks\.3\.norm\.kept keeps a gradient of a block"),
        (BlocksKeepALoss, 2, r"attribute blocks\.3\.norm\.kept keeps a gradient of a block"),
        (PrologueSetsAMask, 2, r"attribute mask is set by every micro-batch before a block"),
        (
            PrologueSetsMasksOfBlocks,
            3,
            r"attribute blocks\.1\.mask is set by every micro-batch before a block",
        ),
        (KeepsThePrologue, 1, r"attribute first is set before a block"),
    ],
)
def test_a_tensor_in_an_attribute_is_refused_by_name(tmp_path, kind, count, said):
    model = build(kind)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(ModelNotSupported, match=said):
        engine.step(batches(0, count))


@pytest.mark.parametrize("kind", [PrologueSetsAMask, PrologueSetsMasksOfBlocks])
def test_a_mask_in_an_attribute_works_where_micro_batches_do_not_take_turns(tmp_path, kind):
    check(tmp_path / "one", kind, lambda step: batches(step, 1))
    check(tmp_path / "horizontal", kind, lambda step: batches(step, 2), schedule="horizontal")


class KeepsWhatNobodyReads(Model):
    """Tensors with and without gradients, of a block and of the model's own code."""

    class layer(Layer):
        def forward(self, x):
            y = super().forward(x)
            self.kept, self.norm.kept = y, [y.square().mean()]
            return y + self.kept.detach() - self.kept.detach()

    positions = None

    def run(self, x, tokens):
        if self.positions is None or self.positions.shape != tokens.shape:
            self.positions = tokens.cumsum(-1)
        self.first, self.positions = x, tokens.cumsum(-1)
        x = super().run(x, tokens)
        self.last = x
        return x


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_attributes_nobody_reads_are_allowed(tmp_path, schedule):
    check(tmp_path, KeepsWhatNobodyReads, schedule=schedule)
    assert KeepsWhatNobodyReads.positions is None
    assert "kept" not in vars(KeepsWhatNobodyReads.layer) and "first" not in vars(KeepsWhatNobodyReads)


class RemembersTheLast(Model):
    """What the last micro-batch left: where this code left it itself, and where later code did."""

    kept = total = None

    def run(self, x, tokens):
        x = x if self.kept is None else x + self.kept
        self.kept = x.mean().detach()
        return super().run(x, tokens)

    def loss(self, x, targets):
        x = x if self.total is None else x + self.total
        self.total = x.mean().detach()
        return super().loss(x, targets)


class RemembersTooLate(Model):
    last = None

    def run(self, x, tokens):
        return super().run(x if self.last is None else x + self.last, tokens)

    def loss(self, x, targets):
        self.last = x.mean().detach()
        return super().loss(x, targets)


def test_attributes_of_the_same_code_equal_plain_loops(tmp_path):
    check(tmp_path / "a", RemembersTheLast)
    check(tmp_path / "b", RemembersTooLate, schedule="horizontal")
    model = build(RemembersTooLate)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path / "c", precision="fp32")
    with pytest.raises(ModelNotSupported, match="attribute last is set by every micro-batch"):
        for step in range(2):
            engine.step(batches(step, 2))


class ReadsItsMaskLater(PrologueSetsAMask):
    """From the third step on."""

    class layer(Layer):
        def forward(self, x):
            return super().forward(x) * (model_of_masks.mask if model_of_masks.calls > 4 else 1)

    calls = 0

    def run(self, x, tokens):
        self.calls += 1
        return super().run(x, tokens)


def test_attribute_read_in_later_steps_is_refused(tmp_path):
    model = build(ReadsItsMaskLater)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    for step in range(2):
        engine.step(batches(step, 2))
    with pytest.raises(ModelNotSupported, match="attribute mask is set by every micro-batch before a block"):
        engine.step(batches(2, 2))
    assert "mask" not in vars(ReadsItsMaskLater)


class CachesATable(Model):
    """Once, as tables of rotary embeddings are, in a block and before the blocks."""

    class layer(Layer):
        table = None

        def forward(self, x):
            self.table = torch.linspace(0, 1, WIDTH) if self.table is None else self.table
            return super().forward(x) + self.table

    def run(self, x, tokens):
        self.table = getattr(self, "table", torch.linspace(0, 1, WIDTH))
        return super().run(x + self.table, tokens)


def test_a_cached_table_is_no_tensor_handed_on(tmp_path):
    check(tmp_path, CachesATable)


def hooks_the_input(model):
    model.blocks[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(lambda g: g * 0) and None)


def hooks_the_output(model):
    model.blocks[0].register_forward_hook(lambda _, args, out: out.register_hook(lambda g: g * 0) and None)


def hooks_the_prologue(model):
    model.embed.register_forward_hook(lambda _, args, out: out.register_hook(lambda g: g * 0) and None)


@pytest.mark.parametrize(
    "hooks, block", [(hooks_the_input, 1), (hooks_the_output, 1), (hooks_the_prologue, 0)]
)
def test_a_hook_on_the_gradient_of_an_input_is_refused_by_name(tmp_path, hooks, block):
    model = build(Model)
    hooks(model)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(
        ModelNotSupported, match=rf"an input of blocks\.{block}, shape .* has a hook on its grad"
    ):
        engine.step(batches(0, 2))


class HooksInsideAndAfter(Model):
    class layer(Layer):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 1.5)
            return y * 1.25

    def loss(self, x, targets):
        x.register_hook(lambda grad: grad * 0.5)
        return super().loss(x, targets)


def test_hooks_inside_of_blocks_and_after_them_are_called(tmp_path):
    check(tmp_path, HooksInsideAndAfter)


@pytest.mark.parametrize(
    "order, said",
    [
        ([0, 1], "after block 1 the model returned, where block 2 was to come"),
        ([0, 2, 3], "after block 0 the model called block 2, where block 1 was to come"),
        ([1, 0, 2, 3], "the model called block 1, where block 0 was to come"),
        ([0, 1, 1, 2, 3], "after block 1 the model called block 1, where block 2 was to come"),
        ([0, 1, 2, 3, 0], r"the model called blocks\.0 again after its last block"),
        ([], "the model returned, where block 0 was to come"),
    ],
)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.campaign(cover=True)
def test_blocks_run_once_and_in_order(tmp_path, order, said, schedule):
    class Wandering(Model):
        def run(self, x, tokens):
            for index in order:
                x = self.blocks[index](x)
            return x

    model = build(Wandering)
    engine = holdfast.offload(
        model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32", schedule=schedule
    )
    with pytest.raises(ModelNotSupported, match=said):
        engine.step(batches(0, 2))


# How long things live


def live_tensors(layers, directory):
    """Tensors of the size of a block input that are alive in the second step when each of three micro-batches
    runs backward through block 0."""

    class Counting(Model):
        class layer(Layer):
            def forward(self, x):
                if torch.is_grad_enabled() and self is model.blocks[0]:
                    counts.append(of_that_size() - before)
                return super().forward(x)

    def of_that_size():
        tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
        return sum(tensor.shape == (2, CONTEXT, WIDTH) for tensor in tensors)

    gc.collect()  # what earlier tests have left
    Counting.layers, counts, before = layers, [], of_that_size()
    model = build(Counting)
    with holdfast.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        directory,
        precision="fp32",
        placement=holdfast.Placement(activations_on_host=0.0),
    ) as engine:
        for step in range(2):
            engine.step(batches(step, 3))
    return counts[3:]


@pytest.mark.slow
def test_no_more_inputs_and_gradients_live_however_many_blocks_there_are(tmp_path):
    few, many = live_tensors(4, tmp_path / "few"), live_tensors(12, tmp_path / "many")
    assert few == many
    assert few == [few[2] + 4, few[2] + 2, few[2]]  # an input and its gradient go with each micro-batch


def test_the_prologue_of_a_micro_batch_is_let_go_as_soon_as_its_backward_is_over(tmp_path):
    made, alive = [], []

    class Remembering(Model):
        class layer(Layer):
            def forward(self, x):
                if torch.is_grad_enabled() and self is model.blocks[0]:
                    alive.append([ref() is not None for ref in made])
                return super().forward(x)

        def run(self, x, tokens):
            made.append(weakref.ref(x))
            return super().run(x * x, tokens)  # the graph holds x

    model = build(Remembering)
    with holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32") as engine:
        engine.step(batches(0, 3))
        assert alive == [[True, True, True], [False, True, True], [False, False, True]]
        assert [ref() for ref in made] == [None] * 3


def test_an_evaluation_shares_a_mapping_too(tmp_path):
    model, plain = build(SharedMapping), build(SharedMapping)
    with (
        holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32") as engine,
        torch.no_grad(),
    ):
        expected = [plain(**batch).item() for batch in batches(0, 2)]
        assert engine.evaluate(batches(0, 2)) == sum(expected) / 2


def test_a_block_that_removes_what_blocks_share_is_refused_by_name(tmp_path):
    class Removing(Model):
        class layer(Layer):
            def forward(self, x, shared):
                shared.pop("x", None)
                return super().forward(x)

        def run(self, x, tokens):
            shared = UserDict(x=x)
            for block in self.blocks:
                x = block(x, shared)
            return x

    model = build(Removing)
    engine = holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32")
    with pytest.raises(ModelNotSupported, match=r"blocks\.0 removed the entry 'x' of a mapping"):
        engine.step(batches(0, 2))
