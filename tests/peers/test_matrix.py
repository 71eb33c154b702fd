"""The matrix, from the real DeepSpeed: what ZeRO-1, 2 and 3 of 2, 3 and 4 ranks wrote any parallelism resumes, every
tensor bit for bit as DeepSpeed reports it, and goes on as DeepSpeed went on."""

from __future__ import annotations

import pytest
import torch

from combined import CAMPAIGN
from dist.awkward_decoder import Awkward, Form
from dist.world import World
from matrix.cells import SIZES, STEPS, WRITTEN, ZERO, form_of, merged
from peers.launching import deepspeed
from survive_run import digest

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

CELLS = (
    [(source, target) for source in ZERO for target in SIZES]
    if CAMPAIGN
    else [(f"zero{1 + n % 3}x{2 + n // 3 % 3}", target) for n, target in enumerate(SIZES)]
)
"""Each target once, and each stage with each number of ranks; in a campaign all of them."""
WRITTEN_FOR = {(source, form_of(source, target)) for source, target in CELLS}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By name and form: the folder of a checkpoint, and what DeepSpeed says that it is of."""
    found = {}
    for world in sorted({ranks for _, ranks in ZERO.values()}):
        root = tmp_path_factory.mktemp(f"zero-{world}")
        which = {
            f"{name}-{form[0]}": (name, form) for name, form in sorted(WRITTEN_FOR) if ZERO[name][1] == world
        }
        jobs = [
            {"do": "save", "name": job, "folder": str(root / job), "stage": ZERO[name][0], "form": form,
             "steps": STEPS - WRITTEN}
            for job, (name, form) in which.items()
        ]  # fmt: skip
        for job, told in deepspeed(root, world, jobs).items():
            found[which[job]] = root / job, told
    return found


@pytest.fixture(scope="module")
def resumed(written, tmp_path_factory):
    """By target what each of its ranks said, by each source that is tried."""
    made, wanted = {}, {}
    for source, target in CELLS:
        wanted.setdefault(target, []).append(source)
    with World() as world:

        def by(target):
            if target not in made:
                form = form_of(*ZERO, target)
                sources = {name: str(written[name, form][0]) for name in wanted[target]}
                order = {
                    "topology": target,
                    "root": tmp_path_factory.mktemp(target),
                    "steps": STEPS,
                    "told": [WRITTEN],
                }
                made[target] = world.run(SIZES[target], sources=sources, form=form, **order)
            return made[target]

        yield by


def digests_of(told, form):
    """Of all that there is, by the names that ranks use: what DeepSpeed says, and what is never trained."""
    tensors = dict(told["tensors"])
    for key in told["tensors"]:
        tensors[key.rpartition("/")[0] + "/step"] = torch.tensor(float(WRITTEN))
    model = Awkward(Form(*form))
    frozen = {f"{name}/param": p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    found = tensors | frozen | dict(model.named_buffers())
    return {key: digest({key: tensor}) for key, tensor in found.items()}


@pytest.mark.parametrize(("source", "target"), CELLS)
def test_what_zero_wrote_any_parallelism_resumes(written, resumed, source, target):
    form = form_of(source, target)
    _, told = written[source, form]
    said = [rank.get(source, rank) for rank in resumed(target)]
    assert merged(said, WRITTEN) == digests_of(told, form)
    for rank in said:
        assert rank["resumed"] == WRITTEN
        assert rank["losses"] == pytest.approx(told["losses"], rel=1e-6)
