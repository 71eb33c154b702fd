"""Ranks that exchange the largest elements of their gradients: what each of them gets, and what is recorded of it."""

from __future__ import annotations

import pytest
import torch

import hook_run
from holdfast.checkpoint.compression.codecs import ArrayReader, expand
from holdfast.checkpoint.compression.lossy import Sparse
from holdfast.state.plain_tensors import TO_NAME
from support.warm_python import TESTS, environment_of, run_python
from training import same_bits

BLOCK = hook_run.CODEC.block


@pytest.fixture(scope="module", params=["2", "4", "2 scaled"])
def ranks(request, tmp_path_factory):
    """By rank, what it saw in each step."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [TESTS / "hook_run.py", folder, *request.param.split()]
    done = run_python(*words, env=environment_of(), modules=["hook_run"], timeout=100)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(int(request.param[0]))]


def largest(flat):
    """The largest twentieth of each block of ``flat``, and zeros elsewhere."""
    out = torch.zeros_like(flat)
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        places = block.abs().topk(max(1, round(0.05 * block.numel()))).indices
        out[start + places] = block[places]
    return out


def is_infinite(ranks, step):
    return not all(g.isfinite().all() for g in ranks[0][step]["given"].values() if g is not None)


@pytest.mark.campaign(keep=2)
def test_one_step_in_the_scaled_run_is_infinite(ranks, request):
    infinite = [step for step in range(hook_run.STEPS) if is_infinite(ranks, step)]
    assert infinite == (
        [hook_run.INFINITE] if request.node.callspec.params["ranks"].endswith("scaled") else []
    )


def test_every_rank_gets_the_mean_of_what_all_of_them_selected(ranks):
    residuals = [{n: torch.zeros(g.shape) for n, g in rank[0]["given"].items()} for rank in ranks]
    for step in range(hook_run.STEPS):
        if is_infinite(ranks, step):  # on all ranks, whose residuals stay
            for rank, held in zip(ranks, residuals, strict=True):
                assert not rank[step]["given"]["first.weight"].isfinite().all()
                assert all(same_bits(rank[step]["residuals"][name], held[name]) for name in held)
            continue
        for name, given in ranks[0][step]["given"].items():
            total = torch.zeros_like(residuals[0][name]).view(-1)
            for rank, held in zip(ranks, residuals, strict=True):
                own = rank[step]["own"][name]
                if own is not None and own.any():
                    wanted = (held[name] + own).view(-1)
                    chosen = largest(wanted).to(own.dtype).float()
                    total, held[name] = total + chosen, (wanted - chosen).view(own.shape)
                found = rank[step]["residuals"][name]
                assert same_bits(found, held[name]), (step, name)
            if (given is not None and step % 3 != 2) or "spare" not in name:
                expected = (total / len(ranks)).view(given.shape).to(given.dtype)
                assert all(same_bits(rank[step]["given"][name], expected) for rank in ranks), (step, name)


def test_what_no_rank_used_stays_without_gradient_and_keeps_its_residual(ranks):
    for rank in ranks:
        assert rank[2]["given"]["spare.weight"] is None and rank[1]["given"]["spare.weight"] is not None
        assert same_bits(rank[2]["residuals"]["spare.weight"], rank[1]["residuals"]["spare.weight"])
        assert rank[1]["residuals"]["spare.weight"].any()


def test_a_record_of_it_takes_no_more_than_all_ranks_selected(ranks):
    codec = Sparse(hook_run.CODEC, len(ranks))
    for step in ranks[0]:
        for given in (g for g in step["given"].values() if g is not None):
            arrays = codec.compress(given.reshape(-1), given.dtype)
            most = codec.sizes(given.numel(), given.dtype)
            limit = sum(dtype.itemsize * count for dtype, count in most.values())
            assert sum(array.nbytes for array in arrays.values()) <= limit
            assert limit <= given.nbytes + 2 * -(-given.numel() // BLOCK)
            keyed = {f"{name}/{TO_NAME[array.dtype]}": array for name, array in arrays.items()}
            back = expand(codec.about(), ArrayReader(keyed).take, given.numel(), given.dtype)
            assert same_bits(back.view(given.shape), given)


def test_a_gradient_that_was_changed_off_the_support_is_recorded_dense(ranks):
    given = ranks[0][0]["given"]["first.weight"].reshape(-1) + 1e-3
    arrays = Sparse(hook_run.CODEC, len(ranks)).compress(given, given.dtype)
    assert arrays["indices"].numel() == 0 and same_bits(arrays["values"], given)
