"""Several ranks of a script with ``OffloadedDDPStrategy`` train as those of the unmodified one do under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from dist.world import World, finished
from integrations_interrupt import close_engines

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use_cache was switched off"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(scope="module")
def world():
    with World("fitting") as world:
        yield world


@pytest.fixture(autouse=True)
def engines_are_closed():
    yield
    close_engines()


def weights(root: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(root / f"weights-{rank}.pt")


def test_the_numbers_are_those_under_ddp_also_after_a_kill(world, tmp_path):
    """Losses, values logged over all ranks, validations and weights. The kill comes within the second epoch."""
    script: dict[str, Any] = {
        "noise": True,
        "accumulate_grad_batches": 2,
        "enable_checkpointing": True,
        "gradient_clip_val": 1.0,
    }
    place = {name: str(tmp_path / name) for name in ("plain", "whole", "cut")}
    for each in place.values():
        Path(each).mkdir()
    cut = world.run(2, root=place["cut"], act=[1, "kill", 5], **script)
    assert cut[1]["code"] == -9 and "RankFailed" in cut[0]["error"], cut
    orders = [
        script | {"root": place["plain"], "strategy": "ddp"},
        script | {"root": place["whole"]},
        script | {"root": place["cut"]},
    ]
    plain, whole, rest = (finished(each) for each in world.run_each(2, orders))
    for one, other, resumed in zip(plain, whole, rest, strict=True):
        assert (one["processes"], other["processes"], len(other["told"])) == (2, 2, 12)
        for mine, theirs in zip(other["told"], one["told"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert other["ended"]["metrics"] == pytest.approx(one["ended"]["metrics"], rel=1e-5)
        assert resumed["ended"] == other["ended"]
        assert 0 < len(resumed["told"]) < 6
        assert resumed["told"] == other["told"][-len(resumed["told"]) :]
    for rank in (0, 1):
        expected = weights(tmp_path / "plain")
        torch.testing.assert_close(weights(tmp_path / "whole", rank), expected, rtol=1e-5, atol=1e-6)
    [saved] = (tmp_path / "whole/checkpoints").iterdir()
    torch.testing.assert_close(
        torch.load(saved, weights_only=False)["state_dict"], weights(tmp_path / "whole"), rtol=0, atol=0
    )


def test_another_number_of_ranks_goes_on(world, tmp_path):
    """Where a step has as many samples. A rank that fails ends the other with an error."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    order = {"rows": True, "limit_val_batches": 0, "samples": 24, "accumulate_grad_batches": 2}
    cut = world.run(2, root=tmp_path / "cut", act=[0, "fail", 5], **order)
    assert "of this process alone" in cut[0]["error"] and "RankFailed" in cut[1]["error"], cut
    whole = finished(world.run(2, root=tmp_path / "whole", **order))
    [rest] = finished(world.run(1, root=tmp_path / "cut", **order | {"batch_size": 4}))
    assert rest["processes"] == 1 and 0 < len(rest["told"]) < 6
    for name in range(2):  # the loss, and its mean over ranks as it was logged
        mean = [(one[name] + other[name]) / 2 for one, other in zip(*(r["told"] for r in whole), strict=True)]
        assert [each[name] for each in rest["told"]] == pytest.approx(mean[-len(rest["told"]) :], rel=1e-5)
    metrics = [each["ended"]["metrics"]["loss_epoch"] for each in (rest, *whole)]
    assert metrics == pytest.approx(3 * [metrics[0]], rel=1e-5)
    torch.testing.assert_close(weights(tmp_path / "cut"), weights(tmp_path / "whole"), rtol=1e-5, atol=1e-6)


def test_what_cannot_work_is_refused(world, tmp_path):
    refused = {
        "alone": ({"strategy": "one process"}, "give OffloadedDDPStrategy"),
        "norms": ({"sync_batchnorm": True}, "sync_batchnorm=True"),
    }
    said = world.run_each(2, [{"root": str(tmp_path / name)} | order for name, (order, _) in refused.items()])
    for each, (name, (_, text)) in zip(said, refused.items(), strict=True):
        assert all(text in rank["error"] for rank in each), each
        assert not (tmp_path / name / "run").exists()
