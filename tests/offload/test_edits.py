"""What a script changes in a model in training is refused by name, and the run goes on with its own values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.optim import Joined
from plain_loops import PLACEMENTS
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored


def in_place(model, optimizer):
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def in_place_frozen(model, optimizer):
    with torch.no_grad():
        model.embed.weight[3] = 0.0


def of_a_submodule(model, optimizer):
    model.norm.load_state_dict({"weight": torch.full_like(model.norm.weight, 2.0)})


def of_a_block(model, optimizer):
    model.blocks[1].mlp.load_state_dict(
        {name: torch.ones(p.shape) for name, p in model.blocks[1].mlp.named_parameters()}
    )


def by_the_optimizers_groups(model, optimizer):
    with torch.no_grad():
        for parameter in optimizer.param_groups[1]["params"]:
            parameter.fill_(1.0)


def another_in_its_place(model, optimizer):
    model.head.weight = nn.Parameter(torch.zeros(model.head.weight.shape))


def assigned(model, optimizer):
    values = {name: torch.zeros(p.shape) for name, p in model.blocks[1].mlp.named_parameters()}
    model.blocks[1].mlp.load_state_dict(values, assign=True)


def other_memory(model, optimizer):
    model.head.weight.data = torch.zeros(model.head.weight.shape)


def another_dtype(model, optimizer):
    with pytest.raises(ModelNotSupported, match=r"parameter blocks\.0\.\S+ was used between steps"):
        model.half()  # the embedding has got it by then


def other_state(model, optimizer):
    numbers = itertools.count()
    groups = [
        {**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


EDITS = {
    in_place: "parameter head.weight",
    in_place_frozen: "parameter embed.weight",
    of_a_submodule: "parameter norm.weight",
    of_a_block: "parameter blocks.1.mlp.down.weight and 2 more",
    by_the_optimizers_groups: r"parameter blocks.0.* and \d+ more",
    another_in_its_place: "parameter head.weight",
    assigned: "parameter blocks.1.mlp.down.weight and 2 more",
    other_memory: "parameter head.weight",
    another_dtype: "parameter embed.weight",
    other_state: "the optimizer's state",
}


def opened(root, **options):
    model = decoder(blocks=3)
    model.embed.weight.requires_grad_(False)
    optimizer = adamw(model)
    return (
        model,
        optimizer,
        holdfast.offload(model, optimizer, root, **grouped(**{"dtype": "bf16", **options})),
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of four steps without edits, and what they leave."""
    root = tmp_path_factory.mktemp("plain")
    with opened(root)[2] as engine:
        losses = [engine.step(batches(step, 2)) for step in range(4)]
    return losses, stored(root)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_between_steps_is_refused_by_name_and_changes_no_bit(tmp_path, plain, edit):
    model, optimizer, engine = opened(tmp_path / "run")
    with engine:
        found = [engine.step(batches(0, 2))]
        edit(model, optimizer)
        with pytest.raises(BadInput, match=f"{EDITS[edit]} changed outside of engine.step.* put back"):
            engine.step(batches(1, 2))
        found.append(engine.step(batches(1, 2)))
        edit(model, optimizer)
        with pytest.raises(BadInput, match=EDITS[edit]):
            engine.evaluate(batches(1, 2))
        found.append(engine.step(batches(2, 2)))
        edit(model, optimizer)
        with pytest.raises(BadInput, match=EDITS[edit]):
            engine.state_dict()
        found.append(engine.step(batches(3, 2)))
    losses, state = plain
    assert found == losses
    assert differing(stored(tmp_path / "run"), state) == []


@pytest.mark.parametrize(
    "options",
    [
        PLACEMENTS["host"],
        {"clip_norm": 0.5, **PLACEMENTS["mixed"]},
        {"clip_norm": 0.01, "clipping": "speculate"},
    ],
    ids=str,
)
def test_what_the_engine_itself_does_is_no_edit(tmp_path, options):
    model, optimizer, engine = opened(tmp_path, **options)
    with engine:
        for step in range(3):
            engine.step(batches(step, 2))
            engine.evaluate(batches(step, 1))
            engine.generate(batches(0, 1)[0]["tokens"][:1, :4], 2)
            engine.state_dict()
            engine.save()
            optimizer.zero_grad()
            model.train()


def test_an_edit_before_close_is_lost_with_a_warning_and_the_model_has_the_runs_values(tmp_path):
    model, optimizer, engine = opened(tmp_path)
    engine.step(batches(0, 1))
    in_place(model, optimizer)
    with pytest.warns(UserWarning, match=r"parameter head.weight changed outside.* it was lost"):
        engine.close()
    assert torch.equal(model.head.weight, stored(tmp_path)["head.weight/param"])
    engine.close()


def test_edits_of_a_run_of_forward_passes_are_refused(tmp_path):
    losses = []
    for name in "plain", "edited":
        model = decoder(blocks=2)
        optimizer = holdfast.optim.MeZO(model.parameters(), lr=1e-3)
        with holdfast.offload(model, optimizer, tmp_path / name, precision="fp32") as engine:
            found = [engine.step(batches(0, 2))]
            if name == "edited":
                in_place(model, optimizer)
                with pytest.raises(BadInput, match=r"parameter head.weight"):
                    engine.step(batches(1, 2))
            found += [engine.step(batches(1, 2)), engine.evaluate(batches(2, 1)), engine.step(batches(2, 2))]
        losses.append(found)
    assert losses[0] == losses[1]


def test_a_module_that_is_another_one_is_refused_until_it_is_set_back(tmp_path):
    model, _, engine = opened(tmp_path)
    with engine:
        engine.step(batches(0, 1))
        mlp = model.blocks[0].mlp
        before, mlp.up = mlp.up, nn.Linear(16, 24, bias=False)
        with pytest.raises(BadInput, match=r"module blocks\.0\.mlp\.up is another one .* Set it back"):
            engine.step(batches(1, 1))
        mlp.up = before
        engine.step(batches(1, 1))
        model.head.register_parameter("bias", nn.Parameter(torch.zeros(17)))
        with pytest.raises(BadInput, match=r"module head .* other parameters"):
            engine.step(batches(2, 1))
        model.head.bias = None
        engine.step(batches(2, 1))


def test_an_embedding_that_its_forward_pass_changes_is_refused(tmp_path):
    model = decoder(blocks=2)
    model.embed = nn.Embedding(17, 16, max_norm=1.0)
    with pytest.raises(ModelNotSupported, match=r"embed has max_norm=1.0"):
        holdfast.offload(model, adamw(model), tmp_path)


USES = {
    "saved": lambda optimizer: optimizer.state_dict(),
    "cleared": lambda optimizer: optimizer.state.clear(),
    "read": lambda optimizer: [each["exp_avg"] for each in optimizer.state.values()],
    "set": lambda optimizer: optimizer.state.update({}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("joins", [False, True])
def test_the_optimizers_state_is_refused_while_the_run_holds_it(tmp_path, use, joins):
    """It would be empty, and a file of it would begin from nothing."""
    model = decoder(blocks=2)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = Joined(own) if joins else own
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32") as engine:
        engine.step(batches(0, 2))
        for each in {optimizer, own}:
            with pytest.raises(ModelNotSupported, match=r"the state of (AdamW|Joined) was used.*--to torch"):
                USES[use](each)
        engine.step(batches(1, 2))
    assert own.state_dict()["state"] == {}


def test_a_refused_load_of_joined_optimizers_changes_none_of_them(tmp_path):
    model = decoder(blocks=2)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = Joined(own)
    other = optimizer.state_dict()
    other["param_groups"][0]["lr"] = 0.5
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32") as engine:
        with pytest.raises(ModelNotSupported, match="the state of Joined was used"):
            optimizer.load_state_dict(other)
        assert own.param_groups[0]["lr"] == 1e-3
        engine.step(batches(0, 2))
    assert own.state is optimizer.state
