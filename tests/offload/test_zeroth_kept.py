"""What MeZO keeps between steps: a commit lacks its last update and says so; whoever reads weights has it."""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast import failpoints
from holdfast.offload.engine import Engine
from holdfast.offload.runtime import Step
from holdfast.optim import mezo as mezo_module
from holdfast.optim.mezo import PENDING, Delta
from holdfast.schedule.work import StepShape
from holdfast.store.run_store import LocalStore
from killed import Killed
from plain_loops import PLACEMENTS, model_with_a_frozen_parameter
from training import batches, decoder, differing, state_of, stored, warm_up
from zeroth_loops import STEPS, mezo, offload, plain_loop, reference

COUNT = 3


def model():
    return model_with_a_frozen_parameter(dropout=0.1)


def steps(engine: Engine, stop):
    """Go on to ``stop``; the losses."""
    return [engine.step(batches(step, COUNT)) for step in range(engine.steps_done, stop)]


def killed_after(directory, stop, to, **options):
    """A copy of the run as it is when ``stop`` steps are durable and nothing else has happened."""
    with offload(model(), directory, **options) as engine:
        steps(engine, stop)
        engine.wait()
        assert engine.durable_step == stop
        shutil.copytree(directory, to)
        engine.give_up()
    manifest = LocalStore.read(to).head()
    assert PENDING in manifest.progress and manifest.step == stop
    return to


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path, stop, placement):
    losses, states = reference(COUNT)
    kept = killed_after(tmp_path / "run", stop, tmp_path / "kept")
    with offload(model(), kept, **PLACEMENTS[placement]) as engine:
        assert (engine.steps_done, engine.resumed_from) == (stop, stop)
        assert steps(engine, STEPS) == losses[stop:]
    assert differing(stored(kept), states[-1]) == []


def test_a_resume_where_another_direction_is_drawn_is_said(tmp_path, monkeypatch):
    kept = killed_after(tmp_path / "run", 1, tmp_path / "kept")
    monkeypatch.setattr(mezo_module, "noise_digest", lambda: "of another processor")
    with pytest.warns(UserWarning, match="the last step of MeZO is drawn again here"):
        engine = offload(model(), kept)
    engine.give_up()


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    "options", [{"commit_every": 3, "optimizer_on_host": 1.0}, {"commit_every": 2}, {"retain": 1}]
)
def test_a_run_that_is_stopped_after_every_step_has_the_same_bits_and_whole_files(tmp_path, options):
    losses, states = reference(COUNT)
    for stop in range(1, STEPS + 1):
        with offload(model(), tmp_path, **options) as engine:
            assert steps(engine, stop) == [losses[stop - 1]]
        assert PENDING not in LocalStore.read(tmp_path).head().progress
        assert differing(stored(tmp_path), states[stop - 1]) == []


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", failpoints.NAMES[:6])
def test_a_kill_while_the_weights_catch_up_loses_nothing(tmp_path, kill_at, name):
    losses, states = reference(COUNT)
    engine = offload(model(), tmp_path)
    steps(engine, 3)
    engine.wait()
    kill_at(name)
    with pytest.raises((Killed, holdfast.HoldfastError)):
        engine.save()
    engine.give_up()
    kill_at("")
    with offload(model(), tmp_path) as engine:
        assert steps(engine, 4) == losses[3:4]
    assert differing(stored(tmp_path), states[3]) == []


# Whoever reads weights


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("commit_every", [0, 1, 4])
def test_evaluations_and_state_dicts_between_steps_have_the_last_update_and_change_no_bit(
    tmp_path, placement, commit_every
):
    losses, states = reference(COUNT)
    found = []
    with offload(model(), tmp_path, commit_every=commit_every, **PLACEMENTS[placement]) as engine:
        for step in range(STEPS):
            found.append(engine.step(batches(step, COUNT)))
            if step == 1:  # nothing reads
                continue
            twin = model_with_a_frozen_parameter().eval()
            names = dict(twin.named_parameters())
            if step != 3:
                twin.load_state_dict({name: states[step][f"{name}/param"] for name in names}, strict=False)
                with torch.no_grad():
                    expected = sum(float(twin(**batch)) for batch in batches(9, 2)) / 2
                assert engine.evaluate(batches(9, 2)) == expected
                assert engine.evaluate(batches(9, 2)) == expected
            held = {f"{name}/param": value for name, value in engine.state_dict().items() if name in names}
            assert differing(held, {key: v for key, v in states[step].items() if key in held}) == []
            assert len(held) == len(names)
    assert found == losses
    if commit_every:
        assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
def test_a_save_after_each_step_writes_whole_files_once(tmp_path):
    _, states = reference(COUNT)
    with offload(model(), tmp_path) as engine:
        for stop in range(1, 4):
            steps(engine, stop)
            engine.save()
            assert engine.durable_step == stop
            assert differing(stored(tmp_path), states[stop - 1]) == []
            before = engine.traffic()
            engine.save()
            assert engine.traffic() == before


@pytest.mark.slow
def test_an_evaluation_after_a_resume_keeps_the_place_of_the_loader_and_the_generators(tmp_path):
    """The weights catch up in another commit of the same step, made after the script has fetched a batch."""
    kept = killed_after(tmp_path / "run", 2, tmp_path / "kept")
    with offload(model(), kept) as engine:
        before = LocalStore.read(kept).head()
        torch.rand(3)
        engine.evaluate(batches(9, 1))
        after = LocalStore.read(kept).head()
        assert (after.step, PENDING in after.progress) == (2, False)
        assert after.progress["random"] == before.progress["random"]


@pytest.mark.slow
def test_a_model_gets_the_last_update_back_where_closing_was_broken_off(tmp_path, monkeypatch):
    _, states = reference(COUNT)
    made = model()
    engine = offload(made, tmp_path)
    steps(engine, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "save", broken_off)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    found = {f"{name}/param": parameter for name, parameter in made.named_parameters()}
    assert differing(found, {key: value for key, value in states[1].items() if key in found}) == []


def broken_off(engine):
    raise KeyboardInterrupt


# Other readers of a commit


@pytest.mark.slow
def test_a_commit_of_a_killed_run_is_read_by_others_with_its_last_update(tmp_path):
    """By a conversion, and as the source of another run, which goes on with the same bits."""
    losses, states = reference(COUNT)
    kept = killed_after(tmp_path / "run", 4, tmp_path / "kept")
    assert differing(stored(kept), states[3]) != []
    source = holdfast.From(kept).source()
    assert PENDING not in source.progress
    found = {}
    for key, each in source.atoms.items():
        data = bytearray(each.atom.nbytes)
        source.read(int(each.pieces.part[0]), 0, memoryview(data))
        dtype = {"F32": torch.float32, "I64": torch.int64}[each.atom.dtype]
        found[key] = torch.frombuffer(data, dtype=dtype).view(each.atom.shape)
    assert differing(found, states[3]) == []
    with offload(model(), tmp_path / "other", source=holdfast.From(kept)) as engine:
        assert engine.steps_done == 4
        assert steps(engine, STEPS) == losses[4:]
    assert differing(stored(tmp_path / "other"), states[-1]) == []


@pytest.mark.slow
def test_a_plain_loop_goes_on_from_a_commit(tmp_path):
    """Its own state says which direction comes next."""
    _, states = plain_loop(decoder(2), lambda step: batches(step, 2))
    with offload(decoder(2), tmp_path) as engine:
        for step in range(3):
            engine.step(batches(step, 2))
    found, twin = stored(tmp_path), decoder(2)
    optimizer = mezo(twin)
    scheduler = warm_up(optimizer)
    for name, parameter in twin.named_parameters():
        parameter.data.copy_(found[f"{name}/param"])
        optimizer.state[parameter] = {slot: found[f"{name}/{slot}"].clone() for slot in ("step", "seed")}
    for step in range(STEPS):
        if step >= 3:
            optimizer.step(lambda step=step: sum(float(twin(**b)) for b in batches(step, 2)) / 2)
        else:
            optimizer._opt_called = True
        scheduler.step()
    assert differing(state_of(twin, optimizer), states[-1]) == []


# Steps that are skipped


def test_a_step_that_is_skipped_writes_what_the_step_before_has_moved():
    """However late: whether it is skipped is known after most of it is written."""
    step = Step(number=1, shape=StepShape(micro_batches=1), operations=[], skipped=True)
    assert step.leaves(SimpleNamespace(name="blocks.0"))
    step.delta = Delta(None, ())
    assert not step.leaves(SimpleNamespace(name="blocks.0"))


@pytest.mark.slow
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_with_a_nan_moves_nothing_and_the_next_one_goes_on(tmp_path, placement):
    spoiled = {"step": -1}

    def spoil(made):
        def hook(module, args, output):
            return output * math.nan if spoiled["step"] == 2 else output

        made.head.register_forward_hook(hook)
        return made

    def made(step):
        spoiled["step"] = step
        return batches(step, 2)

    losses, states = plain_loop(spoil(decoder(3)), made)
    assert [math.isnan(loss) for loss in losses] == [False, False, True, False, False, False]
    with offload(spoil(decoder(3)), tmp_path, **PLACEMENTS[placement]) as engine:
        found = []
        for step in range(STEPS):
            found.append(engine.step(made(step)))
            said = engine.last["skipped"]
            assert (said is not None) == (step == 2)
            if step == 2:
                assert "the loss of micro-batch 0 is nan" in said
        assert engine.skipped_steps == 1
    assert [a for a in found if not math.isnan(a)] == [b for b in losses if not math.isnan(b)]
    assert differing(stored(tmp_path), states[-1]) == []
