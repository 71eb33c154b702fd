"""What an optimizer takes of a source that another one wrote, or that has nothing for it."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.errors import OptimizerNotSupported, RunMismatch
from holdfast.optim import AdamW8bit, Apollo, Grass
from training import batches, decoder, stored

MATRICES = ["blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"]
OTHERS = {
    "fewer rows": (
        lambda p: Apollo(p, rank=4),
        lambda p: Apollo(p, rank=2),
        r"exp_avg of \[4, .*keeps \[2, ",
    ),
    "more rows": (lambda p: Apollo(p, rank=2), lambda p: Apollo(p, rank=4), r"exp_avg of \[2, .*keeps \[4, "),
    "rows": (torch.optim.AdamW, lambda p: Apollo(p, rank=2), "another kind of optimizer"),
    "chosen rows": (torch.optim.AdamW, lambda p: Grass(p, rank=2), "another kind of optimizer"),
    "bytes": (torch.optim.AdamW, AdamW8bit, "another kind of optimizer"),
    "no bytes": (AdamW8bit, torch.optim.AdamW, "another kind of optimizer"),
}
SEEDED = {
    "apollo": lambda p: Apollo(p, rank=2, seed=7),
    "grass": lambda p: Grass(p, rank=2, sampled=True, seed=7),
}


def trained(make, steps=2):
    """A model that an optimizer has trained in memory."""
    model = decoder(blocks=2)
    optimizer = make(model.parameters())
    for step in range(steps):
        model(**batches(step, 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def weights(tmp_path):
    """A file with weights alone."""
    torch.save(decoder(blocks=2).state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("theirs, ours, text", OTHERS.values(), ids=OTHERS)
def test_state_of_other_forms_is_refused_and_nothing_is_written(tmp_path, theirs, ours, text):
    model, optimizer = trained(theirs, steps=0)
    with holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32") as engine:
        engine.step(batches(0, 1))
    model, optimizer = trained(ours, steps=0)
    with pytest.raises(RunMismatch, match=text):
        holdfast.offload(
            model, optimizer, tmp_path / "on", precision="fp32", source=holdfast.From(tmp_path / "run")
        )
    assert not (tmp_path / "on").exists()


@pytest.mark.parametrize(
    "theirs, ours", [(torch.optim.AdamW, AdamW8bit), (torch.optim.AdamW, SEEDED["grass"])]
)
def test_state_of_another_kind_is_refused_in_memory(tmp_path, theirs, ours):
    model, optimizer = trained(theirs)
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    model, optimizer = trained(ours, steps=0)
    checkpointer = holdfast.Checkpointer(tmp_path / "on", model=model, optimizer=optimizer)
    with checkpointer, pytest.raises(RunMismatch, match="another kind of optimizer"):
        checkpointer.resume(source=holdfast.From(tmp_path / "run", cast=True))


@pytest.mark.filterwarnings("ignore:beginning from")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED)
def test_seeds_stay_where_all_else_begins_anew(tmp_path, weights, make, steps):
    before = trained(make, steps)
    named = dict(before[0].named_parameters())
    seeds = [int(before[1].state[named[name]]["seed"]) for name in MATRICES]
    assert len(set(seeds)) == 2
    with holdfast.offload(
        *before, tmp_path / "engine", precision="fp32", source=holdfast.From(weights)
    ) as engine:
        engine.step(batches(0, 1))
    found = stored(tmp_path / "engine")
    assert [int(found[f"{name}/seed"]) for name in MATRICES] == seeds
    assert [int(found[f"{name}/step"]) for name in MATRICES] == [1, 1]
    model, optimizer = trained(make, steps)
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume(source=weights)
        held = [optimizer.state[dict(model.named_parameters())[name]] for name in MATRICES]
        assert [sorted(each) for each in held] == [["seed", "step"]] * 2
        assert [(int(each["seed"]), int(each["step"])) for each in held] == [(seed, 0) for seed in seeds]


@pytest.mark.filterwarnings("ignore:beginning from")
def test_a_run_whose_optimizer_has_made_no_step_is_begun_from(tmp_path):
    model, optimizer = trained(SEEDED["apollo"], steps=0)
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    seed = int(optimizer.state[model.blocks[0].mlp.up.weight]["seed"])
    model, optimizer = trained(lambda p: Apollo(p, rank=2, seed=8), steps=0)
    with holdfast.Checkpointer(tmp_path / "on", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume(source=holdfast.From(tmp_path / "run", cast=True))
        assert int(optimizer.state[model.blocks[0].mlp.up.weight]["seed"]) == seed


@pytest.mark.filterwarnings("ignore:beginning from.*does not say")
def test_momentum_without_a_count_of_steps_begins_anew_as_is_told(tmp_path, weights):
    model, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with (
        pytest.warns(UserWarning, match="begins anew"),
        holdfast.offload(
            model, optimizer, tmp_path / "run", precision="fp32", source=holdfast.From(weights)
        ) as engine,
    ):
        engine.save()
    found = stored(tmp_path / "run")
    assert not any(t.any() for key, t in found.items() if key.endswith("/momentum_buffer"))


def test_a_live_optimizer_with_state_of_another_form_is_refused(tmp_path):
    model, optimizer = trained(lambda p: Apollo(p, rank=4))
    optimizer.param_groups[0]["rank"] = 2
    with pytest.raises(OptimizerNotSupported, match=r"exp_avg of \[4, .* keeps \[2, "):
        holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32")
    assert not (tmp_path / "run").exists()
