"""Random numbers belong to a place of the model in a micro-batch of a step, and to nothing else."""

from __future__ import annotations

import copy
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.offload.rng import key_seed, preserved_generators, seed_generators
from training import adamw, batches, decoder

CPU = torch.device("cpu")


def draw():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_place_of_every_micro_batch_of_every_step_and_seed_has_its_own_numbers():
    keys = {
        key_seed(seed, step, micro_batch, place)
        for seed in range(3)
        for step in range(12)
        for micro_batch in range(12)
        for place in ("prologue", "block 0", "block 1", "after 0", "after 1")
    }
    assert len(keys) == 3 * 12 * 12 * 5
    assert all(0 <= key < 2**63 for key in keys)


def test_a_seed_is_the_same_on_every_machine_and_in_every_version():
    assert key_seed(7, 1, 2, "block 3") == 7807594663538205518


def test_torch_python_and_numpy_draw_what_the_seed_says():
    with preserved_generators(CPU):
        seed_generators(5, CPU)
        first = draw()
        seed_generators(5, CPU)
        assert draw() == first
        seed_generators(6, CPU)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_generators_are_as_they_were_afterwards_also_after_an_error():
    seed_generators(1, CPU)
    expected = draw()
    seed_generators(1, CPU)
    with pytest.raises(LookupError), preserved_generators(CPU):
        draw()
        raise LookupError
    assert draw() == expected


def test_a_step_and_an_evaluation_leave_the_global_generators_alone(tmp_path):
    model = decoder(blocks=2, dropout=0.3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        seed_generators(1, CPU)
        expected = draw()
        seed_generators(1, CPU)
        engine.step(batches(0, 2))
        engine.evaluate(batches(0, 2))
        assert draw() == expected


def test_a_block_that_draws_from_python_or_numpy_draws_the_same_when_it_is_run_again(tmp_path):
    model, seen = decoder(blocks=3), []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: seen.append(draw()))
    every = holdfast.Placement(recomputed_fraction=1.0)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32", placement=every) as engine:
        engine.step(batches(0, 2))
        engine.step(batches(1, 2))
    forward, again = [*seen[0:2], *seen[4:6]], [*seen[2:4], *seen[6:8]]
    assert forward == again
    assert len(set(forward)) == 4


def test_keyed_rng_removes_its_hooks():
    model = decoder(blocks=2)
    with holdfast.keyed_rng(model):
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.blocks)


def trained(directory, seed):
    """Losses of a model with dropout, alone on its thread."""
    model = copy.deepcopy(MODEL)
    with holdfast.offload(model, adamw(model), directory, precision="fp32", seed=seed) as engine:
        losses = []
        for step in range(6):
            losses.append(engine.step(batches(step, 2)))
            losses.append(engine.evaluate(batches(step, 1)))
        return losses


MODEL = decoder(blocks=4, dropout=0.3)


@pytest.mark.slow
def test_engines_on_several_threads_take_turns_with_the_generators(tmp_path):
    MODEL.head.register_forward_hook(lambda *_: time.sleep(0.002))  # lets the other thread run
    alone = {seed: trained(tmp_path / f"alone {seed}", seed) for seed in (1, 2)}
    found = {}

    def run(seed):
        found[seed] = trained(tmp_path / f"both {seed}", seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_loss_may_ask_another_engine(tmp_path):
    """On a micro-batch's thread, in the middle of a step: it is that step's turn."""
    teacher, student = decoder(blocks=2), decoder(blocks=2, dropout=0.3)
    with (
        holdfast.offload(teacher, adamw(teacher), tmp_path / "teacher", precision="fp32") as other,
        holdfast.offload(student, adamw(student), tmp_path / "student", precision="fp32") as engine,
    ):
        student.norm.register_forward_pre_hook(lambda *_: other.evaluate(batches(1, 1)) and None)
        assert engine.step(batches(0, 2)) > 0


def test_threads_build_empty_and_real_modules_beside_each_other():
    inside, leave = threading.Event(), threading.Event()
    found = []

    def build():
        with holdfast.empty_parameters():
            inside.set()
            leave.wait(10)
            found.append(nn.Linear(2, 2).weight.device.type)

    thread = threading.Thread(target=build)
    thread.start()
    inside.wait(10)
    found.append(nn.Linear(2, 2).weight.device.type)
    with holdfast.empty_parameters():
        found.append(nn.Linear(2, 2).weight.device.type)
        leave.set()
        thread.join()
        with holdfast.empty_parameters():
            found.append(nn.Linear(2, 2).weight.device.type)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert found == ["cpu", "meta", "meta", "meta"]
