"""Parameters that are not in memory: whatever reads them is refused by name, and they can still be described."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import holdfast
from holdfast.errors import ModelNotSupported
from support.grouped import grouped
from training import VOCABULARY, adamw, batches, differing, stored
from zeroth_loops import mezo

F = nn.functional
WIDTH = 16


class Layer(nn.Module):
    """A block that may know others, which are no children of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.others = []

    def forward(self, x):
        for other in self.others:
            x = x @ other().detach()
        return torch.tanh(self.inner(x)) + x


class Model(nn.Module):
    """``read`` is called at ``place``, and what it returns is added to the hidden states."""

    def __init__(self, place="", read=None):
        super().__init__()
        torch.manual_seed(0)
        self.place, self.read = place, read
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def at(self, place, x):
        return x + self.read(self, x) if place == self.place else x

    def forward(self, tokens, targets=None):
        x = self.at("prologue", self.embed(tokens))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x = self.at("between", x)
        logits = self.head(self.at("epilogue", x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def offloaded(model, directory, **options):
    return holdfast.offload(
        model,
        options.pop("optimizer", None) or adamw(model),
        directory,
        **grouped(**{"dtype": "fp32", **options}),
    )


def refused(name, place):
    return pytest.raises(
        ModelNotSupported, match=rf"^parameter {name} was used {place}[^:]*: .*engine\.state_dict\(\)"
    )


W1 = r"layers\.1\.inner\.weight"


# The model's own code


def weight(model):
    return model.layers[1].inner.weight


class Product(torch.autograd.Function):
    """A function that torch does not ask an object of its own class about."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.T, None


READS = {
    "product": lambda model, x: F.linear(x, weight(model)),
    "detached": lambda model, x: x @ weight(model).detach(),
    "data": lambda model, x: x @ weight(model).data,
    "view": lambda model, x: x * weight(model)[0],
    "norm": lambda model, x: weight(model).norm(),
    "norms": lambda model, x: torch._foreach_norm([*model.layers[1].parameters()])[0],
    "copied": lambda model, x: torch.zeros(WIDTH, WIDTH).copy_(weight(model).detach()).mean(),
    "written into": lambda model, x: torch.add(x, 0, out=weight(model).detach()).mean(),
    "changed": lambda model, x: 0.0 * len(weight(model).detach().zero_()),
    "host": lambda model, x: torch.tensor(weight(model).detach().numpy()).mean(),
    "number": lambda model, x: weight(model).detach().flatten()[0].item(),
    "function of autograd": lambda model, x: Product.apply(x, weight(model)),
    "operator": lambda model, x: torch.ops.aten.mm.default(x[0], weight(model).detach()),
    "function call": lambda model, x: torch.func.functional_call(model.layers[1].inner, {}, (x,)),
    "module": lambda model, x: model.layers[1].inner(x),
    "noise": lambda model, x: torch.randn_like(weight(model)).mean(),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_every_kind_of_read_is_refused(tmp_path, read):
    with (
        refused(W1, r"after layers\.3, the last block"),
        offloaded(Model("epilogue", READS[read]), tmp_path) as engine,
    ):
        engine.step(batches(0, 2))


PLACES = {
    "prologue": r"before layers\.0",
    "between": r"after layers\.1",
    "epilogue": r"after layers\.3, the last block",
}
OPTIONS = [
    {}, {"schedule": "horizontal"}, {"recomputed_fraction": 0.0}, {"embedding_and_head": "streamed"}, {"dtype": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_read_in_any_part_of_the_model_is_refused_with_its_place(tmp_path, place, options):
    said = PLACES[place]
    if "embedding_and_head" in options and place == "prologue":
        said = r"after embed"
    read = READS["product"]
    with refused(W1, said), offloaded(Model(place, read), tmp_path / "step", **options) as engine:
        engine.step(batches(0, 2))
    engine = offloaded(Model(place, read), tmp_path / "evaluation", **options)
    with engine:
        with refused(W1, said):
            engine.evaluate(batches(0, 2))
        with refused(W1, said):
            engine.generate(batches(0, 1)[0]["tokens"][:1, :3], 2)


def test_where_a_read_is_not_seen_the_loss_is_no_number(tmp_path):
    """A constructor of tensors is not asked, as functions of ``torch.jit.script`` are not."""
    model = Model("epilogue", lambda model, x: x @ torch.Tensor(weight(model)))
    with offloaded(model, tmp_path) as engine:
        before = engine.state_dict()
        engine.step(batches(0, 2))
        assert engine.last["skipped"] and "nan" in engine.last["skipped"]
        assert differing(engine.state_dict(), before) == []


def test_a_loss_function_that_reads_blocks_is_refused(tmp_path):
    model = Model()

    def loss_fn(logits, targets):
        penalty = sum(p.pow(2).sum() for p in model.layers.parameters())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-3 * penalty

    given = [(batch["tokens"], batch["targets"]) for batch in batches(0, 2)]
    with offloaded(model, tmp_path / "run") as engine, refused(r"layers\.0\.inner\.weight", "after layers"):
        engine.evaluate(given, loss_fn)
    with refused(r"layers\.0\.inner\.weight", "after layers"), offloaded(model, tmp_path / "run") as engine:
        engine.step(given, loss_fn)


def test_a_block_that_reads_another_ones_parameter_is_refused(tmp_path):
    model = Model()
    model.layers[2].others.append(lambda: model.layers[1].inner.weight)
    with offloaded(model, tmp_path / "evaluation") as engine, refused(W1, r"in layers\.2"):
        engine.evaluate(batches(0, 2))
    with refused(W1, r"in layers\.2"), offloaded(model, tmp_path / "run") as engine:
        engine.step(batches(0, 2))


def test_a_forward_hook_of_a_block_is_outside_of_it(tmp_path):
    model = Model()
    with offloaded(model, tmp_path) as engine:
        inner = []
        model.layers[1].inner.register_forward_hook(
            lambda module, *_: inner.append(float(module.weight.detach().norm()))
        )
        engine.step(batches(0, 2))
        assert len(inner) == 4  # each micro-batch, computed twice
        model.layers[1].register_forward_hook(lambda module, *_: module.inner.weight.norm() and None)
        with refused(W1, r"after layers\.1"):
            engine.evaluate(batches(0, 2))


def test_a_gradients_hook_is_outside_of_blocks(tmp_path):
    def read(model, x):
        x.register_hook(lambda gradient: gradient @ model.layers[3].inner.weight)
        return 0.0

    said = r"in the backward pass of layers\.0"
    with refused(r"layers\.3\.inner\.weight", said), offloaded(Model("prologue", read), tmp_path) as engine:
        engine.step(batches(0, 2))


def test_a_computed_weight_is_refused_by_the_parameters_name(tmp_path):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = Model("epilogue", READS["norm"])
    parametrize.register_parametrization(model.layers[1].inner, "weight", Doubled())
    said = r"layers\.1\.inner\.parametrizations\.weight\.original"
    with refused(said, "after layers"), offloaded(model, tmp_path) as engine:
        engine.step(batches(0, 2))


def test_mezo_refuses_reads(tmp_path):
    model = Model("epilogue", READS["product"])
    with refused(W1, "after layers"), offloaded(model, tmp_path, optimizer=mezo(model)) as engine:
        engine.step(batches(0, 2))


# Objects that the script holds


@pytest.mark.parametrize("name", ["layers.1.inner.weight", "head.weight", "embed.weight"])
@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_parameter_that_was_taken_before_is_refused(tmp_path, name, way):
    """Also one that stays on the device: the model holds another object in training."""
    model = Model("epilogue", lambda model, x: F.linear(x, held))
    held = model.get_parameter(name)
    with refused(name, "after layers"), offloaded(model, tmp_path, embedding_and_head=way) as engine:
        with refused(name, "after layers"):
            engine.evaluate(batches(0, 2))
        engine.step(batches(0, 2))


def test_parameters_of_the_optimizers_groups_are_refused(tmp_path):
    model = Model(
        "epilogue", lambda model, x: sum(p.norm() for g in optimizer.param_groups for p in g["params"])
    )
    optimizer = adamw(model)
    with refused(r"embed\.weight", "after layers"), offloaded(model, tmp_path, optimizer=optimizer) as engine:
        engine.step(batches(0, 2))


@pytest.mark.parametrize("options", [*OPTIONS, {"params_on_host": 1.0}], ids=str)
def test_a_parameter_that_was_kept_from_its_pass_is_refused(tmp_path, options):
    """Its memory belongs to the next block."""
    kept = []
    model = Model("epilogue", lambda model, x: x @ kept[0].detach())
    model.layers[1].inner.register_forward_hook(lambda module, *_: kept.append(module.weight))
    if options.get("recomputed_fraction") == 0.0:  # its graph is still to be used
        model.place, engine = "prologue", offloaded(model, tmp_path, **options)
        model.read = lambda model, x: x @ kept[0].detach() if kept else 0.0
        engine.step(batches(0, 2))
    else:
        engine = offloaded(model, tmp_path, **options)
    with refused(W1, "(before|after) "), engine:
        engine.step(batches(0, 2))


# Nothing is half done


def test_a_refused_step_or_evaluation_leaves_the_run_whole(tmp_path):
    expected = Model()
    with offloaded(expected, tmp_path / "plain") as engine:
        losses = [engine.step(batches(step, 2)) for step in range(3)]
    model = Model("epilogue", lambda model, x: 0.0)
    with pytest.raises(ModelNotSupported), offloaded(model, tmp_path / "run") as engine:
        found = [engine.step(batches(0, 2))]
        model.read = READS["product"]
        with pytest.raises(ModelNotSupported):
            engine.evaluate(batches(5, 2))
        model.read = lambda model, x: 0.0
        found += [engine.step(batches(1, 2))]
        model.read = READS["product"]
        engine.step(batches(2, 2))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with offloaded(Model(), tmp_path / "run") as engine:
        found += [engine.step(batches(engine.steps_done, 2))]
    assert found == losses
    assert differing(stored(tmp_path / "run"), stored(tmp_path / "plain")) == []


# What can be asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_may_ask_what_its_blocks_compute_with(tmp_path, dtype):
    """Device and dtype are those of the compute copy, also in the model's own code."""
    seen = []

    def read(model, x):
        w = next(model.layers[1].parameters())
        seen.append(
            (w.device.type, w.dtype, w.is_meta, tuple(w.shape), w.detach().dtype, w.requires_grad, w.grad)
        )
        return x * torch.ones(len(w), dtype=w.dtype, device=w.device)

    with offloaded(
        Model("prologue", read), tmp_path, dtype={torch.bfloat16: "bf16"}.get(dtype, "fp32")
    ) as engine:
        engine.step(batches(0, 1))
        engine.evaluate(batches(0, 1))
    assert seen == [("cpu", dtype, False, (WIDTH, WIDTH), dtype, True, None)] * 2


def test_a_model_in_training_can_be_described(tmp_path):
    model = Model()
    optimizer = adamw(model)

    def description():
        return [
            (
                *(
                    name,
                    p.shape,
                    p.numel(),
                    p.nelement(),
                    p.dim(),
                    p.size(0),
                    len(p),
                    p.dtype,
                    p.element_size(),
                    p.nbytes,
                ),
                *(p.data.numel(), p.requires_grad, p.is_leaf, p.grad, isinstance(p, nn.Parameter)),
            )
            for name, p in model.named_parameters()
        ]

    before, groups = description(), [id(p) for group in optimizer.param_groups for p in group["params"]]
    with offloaded(model, tmp_path, optimizer=optimizer) as engine:
        engine.step(batches(0, 1))
        assert description() == before
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == groups
        assert (
            f"{weight(model)}"
            == repr(weight(model))
            == "AbsentParameter(layers.1.inner.weight, [16, 16], torch.float32)"
        )
        assert "Linear(in_features=16, out_features=16, bias=True)" in repr(model)
        model.zero_grad()
        optimizer.zero_grad()
        model.layers.requires_grad_(True)
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
        engine.step(batches(1, 1))
    assert description() == before


def test_use_between_steps_is_refused(tmp_path):
    model = Model()
    x = torch.ones(2, WIDTH)
    with offloaded(model, tmp_path) as engine:
        for _ in range(2):
            for use in (
                lambda: weight(model).norm(),
                lambda: model.layers[1](x),
                lambda: copy.deepcopy(model.layers[1]),
                lambda: torch.save(model.layers[1], io.BytesIO()),
                lambda: torch.save(model.layers[1].state_dict(), io.BytesIO()),
            ):
                with refused(r"layers\.1\.inner\.weight", "between steps"):
                    use()
            engine.step(batches(0, 1))
    assert weight(model).norm() > 0


# Beside the blocks


@pytest.mark.parametrize("options", [{}, {"schedule": "horizontal"}, {"recomputed_fraction": 0.0}], ids=str)
def test_the_last_blocks_parameters_may_be_used_after_it(tmp_path, options):
    """They are on the device until the loss is computed, and get both gradients."""
    model = Model("epilogue", lambda model, x: x @ model.layers[3].inner.weight)
    losses = plain_losses(copy.deepcopy(model), 3)
    with offloaded(model, tmp_path, **options) as engine:
        assert [engine.step(batches(step, 1)) for step in range(3)] == losses


def test_gradients_of_both_uses_are_summed_over_micro_batches(tmp_path):
    model = Model("epilogue", lambda model, x: x @ model.layers[3].inner.weight)
    losses = plain_losses(copy.deepcopy(model), 3, 3)
    with offloaded(model, tmp_path) as engine:
        assert [engine.step(batches(step, 3)) for step in range(3)] == pytest.approx(losses, rel=1e-6)


def test_a_block_that_is_left_out_of_blocks_may_be_used_anywhere(tmp_path):
    """As the error advises."""
    model = Model("epilogue", READS["product"])
    losses = plain_losses(copy.deepcopy(model), 3)
    with offloaded(model, tmp_path, blocks=[model.layers[i] for i in (0, 2, 3)]) as engine:
        assert [engine.step(batches(step, 1)) for step in range(3)] == losses


def plain_losses(model, steps, count=1):
    optimizer, losses = adamw(model, fused=True), []
    for step in range(steps):
        total = 0.0
        for batch in batches(step, count):
            loss = model(**batch)
            (loss / count).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses


def test_a_parameter_of_several_blocks_may_be_used_anywhere(tmp_path):
    def shared():
        model = Model("epilogue", lambda model, x: x @ model.layers[0].inner.weight)
        for layer in model.layers:
            layer.inner.weight = model.layers[0].inner.weight
        return model

    losses = plain_losses(shared(), 2)
    with offloaded(shared(), tmp_path) as engine:
        assert [engine.step(batches(step, 1)) for step in range(2)] == pytest.approx(losses, rel=1e-6)


def test_a_model_that_is_given_back_is_as_before(tmp_path):
    model = Model()
    held = [*model.parameters()]
    engine = offloaded(model, tmp_path)
    engine.step(batches(0, 1))
    engine.close()
    assert all(
        now is before and type(now) is nn.Parameter
        for now, before in zip(model.parameters(), held, strict=True)
    )
    assert not any(vars(p).get("absence") for p in held)
    model(**batches(0, 1)[0]).backward()
    copy.deepcopy(model)
