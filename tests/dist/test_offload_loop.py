"""Several ranks of a loop with accelerate, by ``offloaded``, train as those of the unmodified one do under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from dist.world import World, finished
from holdfast.errors import RunMismatch
from holdfast.integrations.accelerate import offloaded
from integrations_interrupt import close_engines
from offloaded_loop_script import NORM, of_rows, train
from survive_run import digest

pytestmark = pytest.mark.filterwarnings("ignore:.*use_cache was switched off")


@pytest.fixture(scope="module")
def world():
    with World("looping") as world:
        yield world


@pytest.fixture
def alone():
    """A script of one process."""
    yield
    close_engines()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights(root: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(root / f"weights-{rank}.pt")


USUAL: dict[str, Any] = {"evaluates": True, "noise": True, "accumulation": 2}
"""Each rank has 6 batches in a pass, the last of which begins anew: 3 steps, in two passes."""
ANY_NUMBER: dict[str, Any] = {
    "samples": 24, "batch_size": 4, "accumulation": 2, "data": {"split_batches": True, "use_seedable_sampler": True},
}  # fmt: skip
"""A script whose steps are the same in any number of processes, if its loss is that of rows."""


def test_losses_and_weights_are_those_under_ddp_also_after_a_kill(world, tmp_path):
    """The norms, rates, evaluations and saved weights as well. The kill comes within the second pass."""
    place = {name: str(tmp_path / name) for name in ("plain", "whole", "cut")}
    for each in place.values():
        Path(each).mkdir()
    cut = world.run(2, root=place["cut"], act=[1, "kill", 5], **USUAL)
    assert cut[1]["code"] == -9 and "RankFailed" in cut[0]["error"], cut
    orders = [
        USUAL | {"root": place["plain"], "plain": True},
        USUAL | {"root": place["whole"], "act": [None, "save", 4]},
        USUAL | {"root": place["cut"]},
    ]
    plain, whole, rest = (finished(each) for each in world.run_each(2, orders))
    for one, other, resumed in zip(plain, whole, rest, strict=True):
        for name in ("losses", "norms", "rates", "evaluated"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
        assert (len(other["losses"]), other["evaluated"][::2], other["durable"]) == (12, [7, 7], 4)
        assert resumed["digest"] == other["digest"]
        assert 0 < len(resumed["losses"]) < 6
        assert resumed["losses"] == other["losses"][-len(resumed["losses"]) :]
    for rank in (0, 1):
        expected = weights(tmp_path / "plain")
        torch.testing.assert_close(weights(tmp_path / "whole", rank), expected, rtol=1e-5, atol=1e-6)
    for folder in ("pretrained", "model"):
        saved = load_file(tmp_path / "whole" / folder / "model.safetensors")
        assert saved.keys() == expected.keys()
        assert {each["saved"] for each in whole} == {digest({name: saved[name] for name in expected})}


def test_another_number_of_ranks_goes_on(world, alone, tmp_path):
    """Where a step has as many samples and moves of the schedule. A rank that fails ends the other with an error."""
    place = {name: str(tmp_path / name) for name in ("whole", "cut", "moves")}
    for each in place.values():
        Path(each).mkdir()
    elastic = ANY_NUMBER | {"loss": "rows"}
    cut = world.run(2, root=place["cut"], act=[0, "fail", 5], **elastic)
    assert "of this process alone" in cut[0]["error"] and "RankFailed" in cut[1]["error"], cut
    orders = [elastic | {"root": place["whole"]}, {"root": place["moves"], "passes": 1}]
    whole, _ = (finished(each) for each in world.run_each(2, orders))
    torch.manual_seed(7)
    told = train(offloaded(Accelerator, f"{place['cut']}/run", clipping=NORM), loss_of=of_rows, **ANY_NUMBER)
    assert 0 < len(told.losses) < 6
    mean = [sum(each) / 2 for each in zip(*(rank["losses"] for rank in whole), strict=True)]
    assert told.losses == pytest.approx(mean[-len(told.losses) :], rel=1e-5)
    assert told.norms == pytest.approx(whole[0]["norms"][-len(told.norms) :], rel=1e-5)
    torch.testing.assert_close(told.weights, weights(tmp_path / "whole"), rtol=1e-5, atol=1e-6)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    commits = sorted((tmp_path / "moves/run/commits").iterdir())
    with pytest.raises(RunMismatch, match="moves the schedule once"):
        train(offloaded(Accelerator, f"{place['moves']}/run", clipping=NORM), batch_size=4)
    assert sorted((tmp_path / "moves/run/commits").iterdir()) == commits


def test_what_cannot_work_is_refused(world, tmp_path):
    """A refusal of one rank in the middle of a step ends the other with an error."""
    refused = {
        "even": ({"data": {"even_batches": False}}, "even_batches=False"),
        "dispatched": ({"data": {"dispatch_batches": True}}, "dispatch_batches=False"),
        "unlike": ({"spoilt": "another loader"}, "batches in an epoch"),
    }
    orders = [{"root": str(tmp_path / name)} | order for name, (order, _) in refused.items()]
    joins = {"root": str(tmp_path / "joins"), "act": [None, "join", 1]}
    *said, joined = world.run_each(2, [*orders, joins])
    assert all("join_uneven_inputs is for" in rank["error"] for rank in joined), joined
    for each, (name, (_, text)) in zip(said, refused.items(), strict=True):
        assert all(text in rank["error"] for rank in each), each
        assert not (tmp_path / name / "run").exists()
    said = other, mine = world.run(2, root=tmp_path / "amid", spoilt="twice")
    assert "was called again before" in mine["error"] and "RankFailed" in other["error"], said
    assert len([*(tmp_path / "amid/run/commits").iterdir()]) == 1  # that of before the first step
