"""Training goes on out of core from what a Checkpointer wrote, and in memory from what the engine wrote."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.distributed import Ranks
from holdfast.errors import ChunkCorrupt, RunMismatch
from holdfast.formats.memory_source import InMemory
from holdfast.formats.readers.huggingface import write_huggingface, write_single
from holdfast.formats.run_directory import CommitSource, write_run
from holdfast.opening import source_of
from holdfast.state.capture import capture
from holdfast.state.tensor_entries import TensorEntry
from holdfast.store.pushing import Pusher
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, differing, state_of, stored, warm_up

BEFORE, STEPS, COUNT = 5, 9, 2


def make(seed=0, **options):
    """A model with a frozen parameter and a buffer, its optimizer and a schedule."""
    model = decoder(blocks=3)
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    model.register_buffer("noted", torch.zeros(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed * 0.01)
    optimizer = adamw(model, **options)
    return model, optimizer, warm_up(optimizer)


def plain_step(model, optimizer, scheduler, step):
    for batch in batches(step, COUNT):
        (model(**batch) / COUNT).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    model.noted.add_(1)


def recorded(root, start, stop, source=None, seed=0):
    """The state after steps ``start`` to ``stop`` of a plain loop with a checkpointer in ``root``."""
    model, optimizer, scheduler = make(seed, fused=True)
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler) as checkpointer:
        assert checkpointer.resume(source=source) == start
        for step in range(start, stop):
            plain_step(model, optimizer, scheduler, step)
            checkpointer.step()
    return state_of(model, optimizer)


def out_of_core(root, start, stop, source=None, seed=0, **options):
    model, optimizer, scheduler = make(seed)
    with holdfast.offload(
        model,
        optimizer,
        root,
        **grouped(scheduler=scheduler, dtype="fp32", clip_norm=0.5, source=source, **options),
    ) as engine:
        assert engine.steps_done == start
        noted = float(model.noted[0])
        for step in range(start, stop):
            engine.step(batches(step, COUNT))
    assert LocalStore.read(root).head().step == stop
    return noted


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("whole"), 0, STEPS)


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("recorded")
    recorded(root, 0, BEFORE)
    return root


@pytest.mark.slow
def test_a_run_of_a_checkpointer_goes_on_out_of_core_bit_for_bit(tmp_path, reference, recorded_run):
    noted = out_of_core(tmp_path, BEFORE, STEPS, holdfast.From(recorded_run), seed=1)
    assert differing(stored(tmp_path), reference) == [] and noted == BEFORE


@pytest.mark.slow
def test_a_run_of_the_engine_goes_on_in_memory_bit_for_bit(tmp_path, reference):
    out_of_core(tmp_path / "engine", 0, BEFORE)
    assert differing(recorded(tmp_path / "run", BEFORE, STEPS, tmp_path / "engine", seed=1), reference) == []


@pytest.mark.slow
def test_a_run_of_the_engine_goes_on_in_another_directory(tmp_path, reference):
    out_of_core(tmp_path / "a", 0, BEFORE)
    out_of_core(tmp_path / "b", BEFORE, STEPS, holdfast.From(tmp_path / "a"), seed=1, params_on_host=1.0)
    assert differing(stored(tmp_path / "b"), reference) == []


@pytest.mark.slow
def test_runs_in_a_bucket_go_on_out_of_core_and_in_memory(tmp_path, reference, recorded_run, bucket):
    Pusher(recorded_run, bucket / "recorded").push()
    out_of_core(tmp_path / "a", BEFORE, STEPS - 1, holdfast.From(f"{bucket}/recorded"), seed=1)
    Pusher(tmp_path / "a", bucket / "engine").push()
    source = f"{bucket}/engine@{STEPS - 1}"
    assert differing(recorded(tmp_path / "b", STEPS - 1, STEPS, source, seed=1), reference) == []


@pytest.mark.slow
def test_a_directory_that_has_a_run_goes_on_from_that(tmp_path, recorded_run):
    out_of_core(tmp_path, BEFORE, BEFORE + 1, holdfast.From(recorded_run))
    out_of_core(tmp_path, BEFORE + 1, BEFORE + 2, holdfast.From(recorded_run))


def test_weights_alone_begin_at_step_0(tmp_path, recorded_run):
    write_huggingface(source_of(str(recorded_run)), tmp_path / "hf", dtype="F32")
    with pytest.warns(UserWarning) as warned:
        out_of_core(tmp_path / "run", 0, 0, holdfast.From(tmp_path / "hf"), seed=1)
    texts = "\n".join(str(each.message) for each in warned)
    assert "no optimizer state of" in texts and "it has no scheduler" in texts
    begun, trained = stored(tmp_path / "run"), source_of(str(recorded_run))
    assert not begun["head.weight/exp_avg"].any()
    reader = RunReader(tmp_path / "run")
    here = CommitSource(reader, reader.head())
    assert here.atoms.keys() == trained.atoms.keys()


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}])
def test_state_that_the_optimizer_does_not_keep_is_refused_before_anything_is_set(
    tmp_path, recorded_run, options
):
    model, _, _ = make(seed=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **options)
    scheduler = warm_up(optimizer)
    before = [dict(group) for group in optimizer.param_groups], dict(scheduler.state_dict())
    with pytest.raises(RunMismatch, match=r"of another kind of optimizer.*exp_avg"):
        holdfast.offload(
            model,
            optimizer,
            tmp_path / "run",
            scheduler=scheduler,
            precision="fp32",
            source=holdfast.From(recorded_run),
        )
    assert ([dict(group) for group in optimizer.param_groups], dict(scheduler.state_dict())) == before
    assert not model.noted.any() and not (tmp_path / "run").exists()


def test_state_of_another_kind_of_optimizer_begins_anew_where_that_is_allowed(tmp_path, recorded_run):
    model, _, _ = make(seed=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="begins anew|hyper-parameters|scheduler"):
        engine = holdfast.offload(
            model, optimizer, tmp_path, precision="fp32", source=holdfast.From(recorded_run, partial=True)
        )
    with engine:
        assert engine.steps_done == BEFORE and optimizer.param_groups[0]["lr"] == 0.1
        engine.step(batches(BEFORE, COUNT))
    begun, trained = stored(tmp_path), source_of(str(recorded_run))
    assert begun["head.weight/momentum_buffer"].any() and "head.weight/exp_avg" in trained.atoms


def test_hyper_parameters_by_which_the_optimizer_keeps_more_are_refused_before_anything_is_set(tmp_path):
    """It is laid out for what it keeps with those that it was given."""

    def sgd(momentum):
        model, _, _ = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.SGD(trained, lr=0.1, momentum=momentum)

    model, optimizer = sgd(0.9)
    with holdfast.Checkpointer(tmp_path / "other", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()  # no optimizer has a state yet
    model, optimizer = sgd(0.0)
    with pytest.raises(
        RunMismatch, match=r"keeps momentum_buffer for .*, and with those that it was given nothing"
    ):
        holdfast.offload(
            model, optimizer, tmp_path / "run", precision="fp32", source=holdfast.From(tmp_path / "other")
        )
    assert optimizer.param_groups[0]["momentum"] == 0 and not (tmp_path / "run").exists()


def test_another_model_is_refused_with_nothing_written(tmp_path, recorded_run):
    model = decoder(blocks=4)
    with pytest.raises(RunMismatch, match=r"it has no blocks\.3"):
        holdfast.offload(
            model, adamw(model), tmp_path / "run", precision="fp32", source=holdfast.From(recorded_run)
        )
    assert not (tmp_path / "run").exists()


def test_damage_is_found_before_anything_is_written(tmp_path, recorded_run):
    copy = tmp_path / "copy"
    write_run(source_of(str(recorded_run)), copy)
    [file] = (copy / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    model, optimizer, _ = make(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ChunkCorrupt):
        holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32", source=holdfast.From(copy))
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("damaged", ["more", "weight"])
def test_of_a_source_only_what_is_wanted_is_checked(tmp_path, damaged):
    tensors = {"weight": torch.full((40, 3), 3.0), "more": torch.full((50,), 7.0)}
    atoms = [(TensorEntry(name, "param", tuple(t.shape), "F32"), t) for name, t in tensors.items()]
    file = write_single(InMemory("x", "test", atoms, {}), tmp_path / "a.safetensors")
    of_it = tensors[damaged].numpy().tobytes()
    file.write_bytes(file.read_bytes().replace(of_it, bytes(len(of_it))))
    model = torch.nn.Linear(3, 40, bias=False)
    optimizer, beginning = adamw(model), holdfast.From(file, partial=True).open()
    beginning.match(capture(model, optimizer), optimizer)
    if damaged == "more":
        beginning.check(Ranks())
        assert torch.equal(beginning.parameter("weight"), tensors["weight"])
    else:
        with pytest.raises(ChunkCorrupt):
            beginning.check(Ranks())


def test_a_place_in_the_data_of_several_ranks_is_refused(tmp_path, recorded_run, monkeypatch):
    class Cursor:
        def state_dict(self):
            return {"batches": 0}

        def load_state_dict(self, state):
            raise AssertionError

    source = source_of(str(recorded_run))
    source.progress = {**source.progress, "ranks": 2, "things": {"loader": {"batches": 3}}}
    monkeypatch.setattr("holdfast.sources.source_of", lambda text: source)
    model, optimizer, _ = make()
    with pytest.raises(
        RunMismatch, match="that Cursor keeps is each rank's own: 2 ranks wrote the run, and 1 rank"
    ):
        holdfast.offload(
            model, optimizer, tmp_path, precision="fp32", loader=Cursor(), source=holdfast.From(recorded_run)
        )
