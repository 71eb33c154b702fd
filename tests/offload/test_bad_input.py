"""What cannot be done is said in one clear line, before anything is written or taken from the caller."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import (
    BadInput,
    DoesNotFit,
    HoldfastError,
    ModelNotSupported,
    OptimizerNotSupported,
    RunLocked,
    RunMismatch,
)
from holdfast.events import read_events
from holdfast.offload.setup import step_planning
from holdfast.offload.text_sampling import chooser
from holdfast.quantities import MiB, parse_bytes
from holdfast.store.disk import Disk
from support.grouped import grouped
from training import CONTEXT, adamw, batches, decoder


def listing(directory):
    """Every file and directory below ``directory``, with sizes and times of change."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        status = path.stat()
        found[str(path)] = None if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


@contextmanager
def refused(directory, kind, match):
    """Inside, ``kind`` is raised with text ``match``; it is bad input, and ``directory`` is as it was."""
    before = listing(directory)
    with pytest.raises(kind, match=match) as caught:
        yield
    assert isinstance(caught.value, HoldfastError)
    assert caught.value.exit_code == 2
    after = listing(directory)
    assert set(after) == set(before)
    assert {p: v for p, v in after.items() if not p.endswith("lock")} == {
        p: v for p, v in before.items() if not p.endswith("lock")
    }


def offload(directory, model=None, optimizer=None, **options):
    model = decoder(blocks=2) if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    return holdfast.offload(
        model, optimizer, directory / "not" / "yet", **grouped(**{"dtype": "fp32", **options})
    )


# Choices


@pytest.mark.parametrize(
    "options, said",
    [
        ({"dtype": "fp8"}, "precision 'fp8' is not one of fp32, bf16, fp16"),
        ({"schedule": "diagonal"}, "schedule = 'diagonal' is not one of vertical, horizontal"),
        ({"order": "spiral"}, "order = 'spiral' is not one of plain, snake"),
        ({"normalize": "words"}, "normalize = 'words' is not one of micro_batches, tokens"),
        ({"commit_every": -1}, "commit_every = -1 must be at least 0"),
        ({"retain": 0}, "retain = 0 must be at least 1"),
        ({"update_workers": 0}, "update_workers = 0 must be at least 1"),
        ({"io_threads": 0}, "threads = 0 must be at least 1"),
        ({"micro_batches": 0}, "micro_batches = 0 must be at least 1"),
        ({"micro_batches": 2.5}, "micro_batches = 2.5 must be at least 1, and whole"),
        ({"read_limit": "1GB"}, "read_limit = '1GB' must be positive, in bytes per second"),
        ({"read_limit": 0}, "read_limit = 0 must be positive"),
        ({"write_limit": -5}, "write_limit = -5 must be positive"),
        ({"clip_norm": 0.0}, "clipping: norm = 0.0 must be a positive number; None is no clipping"),
        ({"clip_norm": float("nan")}, "clipping: norm = nan must be a positive number"),
        ({"clip_norm": "1"}, "clipping: norm = '1' must be a positive number"),
        ({"params_on_host": 1.5}, "params_on_host = 1.5 is neither a fraction between 0 and 1 nor"),
        ({"optimizer_on_host": -0.1}, "optimizer_on_host = -0.1 is neither"),
        ({"activations_on_host": "most"}, "activations_on_host = 'most' is neither"),
        ({"budget": holdfast.Budget(host="lots")}, "'lots' is not a number of bytes"),
        ({"budget": "200MB"}, r"budget = '200MB' .*: write budget=holdfast\.Budget\(host='200MB'\)"),
        ({"sample": 1}, "sample is a int, not a micro-batch as engine.step takes it: a dict of"),
        ({"sample": torch.ones(2)}, "sample is a Tensor, not a micro-batch"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"clip_norm": True}, "norm = True must be a positive number"),
        ({"direct": "no"}, "direct = 'no' must be True or False"),
        ({"drives": [1]}, r"drives = \[1\] is not a list of directories"),
        ({"drives": "/nvme1"}, "drives = '/nvme1' is one directory; give a list of them"),
        ({"placement": {"params": 1.0}}, r"placement = .* is not a holdfast\.Placement"),
        ({"placement": holdfast.Durability()}, r"is not a holdfast\.Placement"),
        ({"io": None}, r"io = None is not a holdfast\.IO"),
        ({"durability": 2}, r"durability = 2 is not a holdfast\.Durability"),
        (
            {"source": "runs/before"},
            r"source = 'runs/before' is a path: write source=holdfast\.From\('runs/b",
        ),
        ({"source": Path("before")}, r"source = 'before' is a path: write source=holdfast\.From\('before'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_choice_is_named_with_the_right_ones(tmp_path, options, said):
    with refused(tmp_path, BadInput, said):
        offload(tmp_path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(tmp_path):
    with refused(tmp_path, BadInput, "device 'cuda:0' is not here: pass device=\"auto\", or one of cpu"):
        offload(tmp_path, device="cuda:0")


def test_foreign_checkpoint_is_no_run_directory(tmp_path):
    place, model = tmp_path / "not" / "yet", decoder(blocks=2)
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes(100))
    with refused(tmp_path, BadInput, "a checkpoint of another library: it has model.safetensors"):
        offload(tmp_path)
    with refused(tmp_path, BadInput, "a checkpoint of another library: it has model.safetensors"):
        holdfast.Checkpointer(place, model=model, optimizer=adamw(model))


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "not").mkdir()
    (tmp_path / "not" / "yet").write_text("mine")
    with refused(tmp_path, BadInput, "is a file"):
        offload(tmp_path)


# Models


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
        self.nothing = nn.ModuleList()


@pytest.mark.parametrize("kind", [Flat, Mixed])
def test_a_model_without_repeated_blocks_is_told_how_to_name_them(tmp_path, kind):
    model = kind()
    with refused(tmp_path, ModelNotSupported, f"{kind.__name__} has no nn.ModuleList of blocks. Pass"):
        offload(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_blocks_that_are_not_the_models_are_refused(tmp_path):
    with refused(tmp_path, ModelNotSupported, r"blocks\[0\], a Linear, is not in the model"):
        offload(tmp_path, blocks=nn.ModuleList([nn.Linear(2, 2)]))


@pytest.mark.parametrize(
    ("pick", "what"),
    [
        (lambda model: [], "is empty"),
        (lambda model: [model.blocks[0], model.blocks[1], model.blocks[0]], "is there twice"),
        (lambda model: [model.blocks[0], model.blocks[0].mlp], r"blocks\[1\], a MLP, lies in another one"),
        (lambda model: [model], "is the whole model"),
    ],
)
def test_blocks_that_cannot_be_streamed_one_by_one_are_refused(tmp_path, pick, what):
    model = decoder(blocks=2)
    with refused(tmp_path, ModelNotSupported, what):
        offload(tmp_path, model, blocks=pick(model))


def test_blocks_without_parameters_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    model.blocks = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    with refused(tmp_path, ModelNotSupported, r"blocks\.0 has no parameters of its own"):
        offload(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_a_parameter_of_integers_is_refused_by_name(tmp_path):
    model = decoder(blocks=2)
    model.blocks[1].table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    with refused(tmp_path, ModelNotSupported, r"parameter blocks\.1\.table is torch\.int64"):
        offload(tmp_path, model)


def test_a_parameter_with_more_precision_than_its_master_is_refused_by_name(tmp_path):
    model = decoder(blocks=2)
    model.blocks[1].double()
    with refused(tmp_path, ModelNotSupported, r"parameter blocks\.1\.\S+ is torch\.float64"):
        offload(tmp_path, model)


@pytest.mark.parametrize("view", ["same", "transposed", "buffer"])
def test_memory_that_is_shared_is_refused(tmp_path, view):
    model = decoder(blocks=2)
    weight = model.blocks[1].attention.out.weight
    if view == "buffer":
        model.blocks[0].register_buffer("kept", weight.data[:2])
    else:
        model.blocks[0].attention.out.weight = nn.Parameter(
            weight.data.t() if view == "transposed" else weight.data
        )
    with refused(
        tmp_path,
        ModelNotSupported,
        r"blocks\.\S+ and blocks\.\S+ are one memory.*Tie parameters as one object",
    ):
        offload(tmp_path, model)


def test_slices_of_one_storage_are_trained(tmp_path):
    model = decoder(blocks=2)
    names, held = zip(*model.named_parameters(), strict=True)
    flat = torch.cat([p.detach().flatten() for p in held])
    for p, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
        p.data = part.view(p.shape)
    plain = {name: p.clone() for name, p in zip(names, held, strict=True)}
    with offload(tmp_path, model) as engine:
        there = engine.state_dict()
    assert all(torch.equal(there[name], plain[name]) for name in names)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameters_gradient_is_refused_by_name(tmp_path, kind):
    model = decoder(blocks=2)
    getattr(model.blocks[1].mlp.up.weight, kind)(lambda grad: None)
    with refused(
        tmp_path, ModelNotSupported, r"parameter blocks\.1\.mlp\.up\.weight has a hook on its gradient"
    ):
        offload(tmp_path, model)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    model = decoder(blocks=2).requires_grad_(False)
    with refused(tmp_path, BadInput, "nothing to train"):
        offload(tmp_path, model)


def test_a_list_of_blocks_inside_blocks_is_not_taken_for_the_blocks(tmp_path):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x):
            return x + sum(expert(x) for expert in self.experts)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    model = Model()
    with holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32") as engine:
        assert engine.preflight.block_names == ("layers.0", "layers.1", "layers.2")
        engine.step([{"x": torch.ones(2, 4)}])


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x)


class Towers(nn.Module):
    """Five small layers, two large ones, and tables that are larger than both."""

    def __init__(self, width=16, table=256):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(table, 4) for _ in range(7))
        self.small = nn.ModuleList(Layer(4) for _ in range(5))
        self.widen = nn.Linear(4, width)
        self.large = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, tokens):
        x = sum(table(tokens) for table in self.tables)
        for layer in self.small:
            x = layer(x)
        x = self.widen(x)
        for layer in self.large:
            x = layer(x)
        return x.square().mean()


def test_largest_list_of_layers_is_streamed(tmp_path):
    model = Towers(width=64, table=8)
    with holdfast.offload(model, torch.optim.AdamW(model.parameters()), tmp_path, precision="fp32") as engine:
        assert engine.preflight.block_names == ("large.0", "large.1")
        assert engine.preflight.streamed_parameters == 2 * (64 * 64 + 64)
        engine.step([{"tokens": torch.zeros(1, 2, dtype=torch.long)}])
    (event,) = (e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "engine")
    assert event["block_names"] == ["large.0", "large.1"]
    assert event["streamed_parameters"] == 2 * (64 * 64 + 64)


def test_mostly_resident_model_is_warned_of(tmp_path):
    model = Towers()
    with pytest.warns(
        UserWarning, match=r"blocks are large\.0 to large\.1, with 7% .* small has 1%.*blocks="
    ):
        holdfast.offload(
            model, torch.optim.AdamW(model.parameters()), tmp_path / "a", precision="fp32"
        ).close()
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.offload(model, optimizer, tmp_path / "b", precision="fp32", blocks=model.large).close()


# Optimizers


def test_optimizers_that_cannot_be_run_out_of_core_are_refused_with_those_that_can(tmp_path):
    model = decoder(blocks=2)
    for kind, why in (
        (torch.optim.LBFGS, "evaluates the model"),
        (torch.optim.SparseAdam, "sparse gradients"),
    ):
        name = kind.__name__
        with refused(
            tmp_path, OptimizerNotSupported, f"{name} cannot be run out of core: it .*{why}.* Use Adam"
        ):
            offload(tmp_path, model, kind(model.parameters()))


def test_a_class_that_calls_itself_adamw_is_not_believed(tmp_path):
    class AdamW(torch.optim.AdamW):
        pass

    model = decoder(blocks=2)
    with refused(tmp_path, OptimizerNotSupported, r"AdamW of \w+ is not known.* Adafactor and Muon of it"):
        offload(tmp_path, model, AdamW(model.parameters()))


def test_an_optimizer_of_other_parameters_says_which(tmp_path):
    model, other = decoder(blocks=2), nn.Linear(3, 5)
    optimizer = adamw(model)
    optimizer.add_param_group({"params": [other.bias, other.weight]})
    with refused(tmp_path, OptimizerNotSupported, r"parameter 0 of optimizer group 2, shape \(5,\)"):
        offload(tmp_path, model, optimizer)


class Stateless:
    pass


class Unstorable:
    def state_dict(self):
        return {"generator": iter(())}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("what", ["scheduler", "loader"])
@pytest.mark.parametrize(
    "thing, said",
    [
        (Stateless(), "Stateless has no state_dict"),
        (Unstorable(), r"\['generator'\] holds a tuple_iterator, which cannot be stored by value"),
    ],
    ids=["stateless", "unstorable"],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path, what, thing, said):
    with refused(tmp_path, BadInput, said):
        offload(tmp_path, **{what: thing})


def test_a_plain_data_loader_is_told_of_holdfasts_own(tmp_path):
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with refused(tmp_path, BadInput, r"DataLoader has no state_dict.*holdfast\.loader"):
        offload(tmp_path, loader=loader)


# Room


def free(nbytes):
    return lambda disk: nbytes


def test_a_disk_too_small_says_how_much_is_needed(tmp_path, monkeypatch):
    with offload(tmp_path / "elsewhere") as engine:
        needed = engine.preflight.needed_bytes
    monkeypatch.setattr(Disk, "free_bytes", free(needed - 1))
    with refused(tmp_path, DoesNotFit, rf"needs .* more \({needed} bytes\).*retain=1"):
        offload(tmp_path)
    monkeypatch.setattr(Disk, "free_bytes", free(needed))
    offload(tmp_path).close()


def test_a_disk_with_room_for_fewer_copies_works_with_fewer(tmp_path, monkeypatch):
    with offload(tmp_path / "elsewhere") as engine:
        three = engine.preflight.needed_bytes
    monkeypatch.setattr(Disk, "free_bytes", free(three * 3 // 4))
    with refused(tmp_path, DoesNotFit, "retain=1"):
        offload(tmp_path)
    with offload(tmp_path, retain=1) as engine:
        engine.step(batches(0, 1))


@pytest.mark.slow
def test_the_space_that_the_preflight_asks_for_is_what_a_run_takes(tmp_path):
    def used(directory):
        return sum(
            path.stat().st_size for path in directory.rglob("*") if path.parent.name in ("data", "scratch")
        )

    for number, options in enumerate(
        ({}, {"params_on_host": 1.0}, {"activations_on_host": 0.0, "clip_norm": 1.0}, {"commit_every": 0})
    ):
        root = tmp_path / str(number)
        sizes = {"sample": batches(0, 1)[0], "micro_batches": 3}
        with offload(root, **sizes, **options) as engine:
            for step in range(2):
                engine.step(batches(step, 3))
            engine.wait()
            assert used(root) == engine.preflight.needed_bytes, options


@pytest.mark.slow
def test_a_budget_too_small_says_one_that_works_in_the_next_process_too(tmp_path, monkeypatch):
    """Which may hold a little more beforehand."""
    sizes = {"sample": batches(0, 1)[0], "micro_batches": 2}
    monkeypatch.setattr(step_planning, "process_bytes", lambda: 400 * MiB)
    with pytest.raises(DoesNotFit) as caught:
        offload(tmp_path, budget=holdfast.Budget(host="10MiB"), **sizes)
    monkeypatch.setattr(step_planning, "process_bytes", lambda: 403 * MiB)
    [enough] = re.findall(r'Give it "(\d+MiB)"', str(caught.value))
    offload(tmp_path, budget=holdfast.Budget(host=enough), **sizes).close()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"budget": holdfast.Budget(host="100GiB")}, "a budget of 107374182400 bytes of host memory"),
        ({"params_on_host": "auto"}, "params_on_host='auto'"),
        ({"optimizer_on_host": "auto", "budget": holdfast.Budget(host="100GiB")}, "optimizer_on_host='auto'"),
        ({"activations_on_host": "auto"}, "activations_on_host='auto'"),
    ],
    ids=["budget", "params", "optimizer", "activations"],
)
def test_a_budget_without_a_sample_to_hold_it_against_is_refused(tmp_path, options, said):
    with refused(tmp_path, BadInput, f"{said} cannot be kept to .*: pass sample=.* and micro_batches="):
        offload(tmp_path, **options)
    offload(tmp_path, sample=batches(0, 1)[0], **options).close()


@pytest.mark.slow
def test_an_evaluation_takes_fewer_micro_batches_at_once_where_the_budget_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(step_planning, "process_bytes", lambda: 0)
    sizes = {"sample": batches(0, 1, rows=512)[0], "micro_batches": 1, "activations_on_host": 0.0}
    input_bytes = 512 * CONTEXT * 16 * 4

    def evaluated(budget):
        with offload(tmp_path / str(budget), decoder(blocks=4), budget=budget, **sizes) as engine:
            loss = engine.evaluate(batches(1, 9, rows=512))
            counts = [shape.micro_batches for kind, shape in engine.operations if kind == "evaluate"]
            return counts, loss, engine.preflight.host_bytes_predicted

    counts, loss, needed = evaluated(None)
    assert counts == [8, 1]
    fewer, same, enough = evaluated(holdfast.Budget(host=needed - 1))
    assert fewer == [4, 1] and same == loss and enough < needed
    least = needed - 7 * input_bytes
    with pytest.raises(DoesNotFit) as caught:
        evaluated(holdfast.Budget(host=1))
    asked = parse_bytes(re.findall(r'Give it "(\d+MiB)"', str(caught.value))[0])
    assert least < asked < least + 4 * MiB
    assert evaluated(holdfast.Budget(host=asked))[1] == loss


def test_a_sample_may_be_a_tuple_with_a_loss(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def offload_tuples(**options):
        model = Model()
        sample = (torch.ones(2, 4), torch.ones(2, 4))
        return offload(tmp_path, model, torch.optim.AdamW(model.parameters()), sample=sample, **options)

    with offload_tuples(loss_fn=nn.functional.mse_loss) as engine:
        assert engine.preflight.host_bytes_predicted is not None
    with (
        pytest.warns(UserWarning, match="memory is not predicted"),
        offload_tuples() as engine,
    ):
        assert engine.preflight.host_bytes_predicted is None


def test_whoever_sees_the_preflight_may_say_no(tmp_path):
    seen = []

    def confirm(preflight):
        seen.append(preflight)
        raise BadInput("too dear")

    with refused(tmp_path, BadInput, "too dear"):
        offload(tmp_path, confirm=confirm)
    assert seen[0].parameters == sum(p.numel() for p in decoder(blocks=2).parameters())


# Runs of others


@pytest.fixture
def run(tmp_path):
    with offload(tmp_path) as engine:
        engine.step(batches(0, 1))
    return tmp_path


def test_a_run_of_another_model_names_the_first_atom_that_differs(run):
    cases = {
        r"blocks\.0\.attention_norm\.weight/param is F32 \[16\] there and F32 \[32\] here": {"width": 32},
        r"blocks\.0\.mlp\.gate\.weight/param is F32 \[24, 16\] there and F32 \[40, 16\] here": {"hidden": 40},
        r"blocks\.2\.attention_norm\.weight/param is absent there and F32 \[16\] here": {"blocks": 3},
        r"blocks\.1\.attention_norm\.weight/param is F32 \[16\] there and absent here": {"blocks": 1},
    }
    for said, sizes in cases.items():
        with refused(run, RunMismatch, said):
            offload(run, decoder(**{"blocks": 2, **sizes}))


def test_a_run_of_another_optimizer_names_what_differs(run):
    model = decoder(blocks=2)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == two] for two in (True, False))
    groups = [{"params": matrices}, {"params": vectors}]
    with refused(
        run, RunMismatch, r"/exp_avg is F32 .* there and absent here|/momentum_buffer is absent there"
    ):
        offload(run, model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    with refused(run, RunMismatch, "2 parameter groups, this one has 1"):
        offload(run, model, torch.optim.AdamW(model.parameters()))


def test_a_run_whose_parameter_groups_were_in_another_order_names_a_parameter(run):
    """Their hyper-parameters would go to the wrong ones."""
    model = decoder(blocks=2)
    groups = adamw(model).param_groups
    swapped = torch.optim.AdamW([{"params": group["params"]} for group in reversed(groups)])
    with refused(run, RunMismatch, r"norm\.weight was in parameter group 1 .* is in group 0 of this one"):
        offload(run, model, swapped)


def test_a_run_with_other_blocks_of_the_same_model_names_them(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in (*self.left, *self.right):
                x = layer(x)
            return x.square().mean()

    model = Two()
    offload(tmp_path, model, torch.optim.AdamW(model.parameters()), blocks=model.left).close()
    said = r"other blocks= .*: there are files of left\.0, left\.1 in it, and here of right\.0, right\.1, right\.2"
    with refused(tmp_path, RunMismatch, said):
        offload(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_a_run_in_which_something_else_was_frozen_names_it(run):
    model = decoder(blocks=2)
    model.blocks[1].mlp.down.weight.requires_grad_(False)
    with refused(run, RunMismatch, r"blocks\.1\.mlp\.down\.weight/exp_avg is F32 .* there and absent here"):
        offload(run, model)


def test_a_run_on_another_text_is_refused_by_its_loader(tmp_path):
    def loader(count):
        return holdfast.loader(list(range(count)), 2)

    offload(tmp_path, loader=loader(10)).close()
    with refused(tmp_path, RunMismatch, "the data is not what the run was trained on"):
        offload(tmp_path, loader=loader(11))


def test_a_directory_that_is_being_written_is_refused(tmp_path):
    with offload(tmp_path) as engine:
        engine.step(batches(0, 1))
        engine.wait()
        with refused(tmp_path, RunLocked, f"is being written by this very process .{os.getpid()}."):
            offload(tmp_path)
        engine.step(batches(1, 1))


@pytest.mark.parametrize("options", [{"schedule": "diagonal"}, {"blocks": nn.ModuleList()}])
def test_what_was_refused_can_be_trained_afterwards(tmp_path, options):
    """Nothing of the model was changed."""
    model = decoder(blocks=2)
    optimizer = adamw(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HoldfastError):
        offload(tmp_path, model, optimizer, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with offload(tmp_path, model, optimizer) as engine:
        engine.step(batches(0, 1))


# Steps


def test_a_step_of_nothing_is_refused_and_the_engine_goes_on(tmp_path):
    with offload(tmp_path) as engine:
        engine.step(batches(0, 1))
        for call in (engine.step, engine.evaluate):
            with pytest.raises(BadInput, match="needs at least one micro-batch"):
                call([])
        assert engine.step(batches(1, 1)) > 0
        assert engine.steps_done == 2


def test_token_weights_without_targets_are_refused_and_the_engine_goes_on(tmp_path):
    with offload(tmp_path, normalize="tokens") as engine:
        with pytest.raises(BadInput, match='normalize="tokens" needs "labels" or "targets"'):
            engine.step([{"tokens": batches(0, 1)[0]["tokens"]}])
        engine.step(batches(0, 1))
        assert engine.steps_done == 1


# Memory, sampling


class Caching(nn.Module):
    """Makes a table at its first forward, as an attribute, a buffer and an item of a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("lazy", None, persistent=False)
        self.tables = []

    def forward(self, x):
        if self.lazy is None:
            self.table = self.lazy = torch.arange(4.0)
            self.tables.append(self.table)
        x = x + self.table + self.lazy + self.tables[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_model_is_measured_without_a_trace(tmp_path):
    sample, losses = {"x": torch.ones(2, 4)}, []
    for options in ({}, {"sample": sample}):
        torch.manual_seed(0)
        model = Caching()
        with offload(
            tmp_path / f"{len(options)}", model, torch.optim.SGD(model.parameters()), **options
        ) as engine:
            assert model.lazy is None and model.tables == [] and not hasattr(model, "table")
            losses.append(engine.step([sample]))
    assert losses[0] == losses[1]


def test_a_budget_is_not_checked_against_half_of_what_is_needed(tmp_path):
    class Untraceable(type(decoder())):
        def forward(self, tokens, targets=None):
            if float(tokens.sum()) < 0:
                raise ValueError
            return super().forward(tokens, targets)

    model = decoder(blocks=2)
    model.__class__ = Untraceable
    with pytest.warns(UserWarning, match="memory is not predicted and no budget is checked"):
        engine = offload(tmp_path, model, sample=batches(0, 1)[0], budget=holdfast.Budget(host="1MiB"))
    with engine:
        assert engine.preflight.host_bytes_predicted is None
        engine.step(batches(0, 1))
    with (
        pytest.warns(UserWarning, match="memory is not predicted"),
        refused(tmp_path, BadInput, "params_on_host='auto' cannot be chosen within a budget"),
    ):
        budget = holdfast.Budget(host="100GiB")
        offload(tmp_path, model, sample=batches(0, 1)[0], budget=budget, params_on_host="auto")


def test_a_budget_may_be_a_float(tmp_path):
    with offload(tmp_path, sample=batches(0, 1)[0], budget=holdfast.Budget(host=20e9)) as engine:
        assert engine.preflight.host_budget == 20_000_000_000


def test_a_device_budget_is_checked(tmp_path):
    with offload(tmp_path) as engine:
        preflight = replace(engine.preflight, device_bytes_predicted=101, device_budget=100)
    with pytest.raises(DoesNotFit, match=r'device memory.*or give it "1MiB" \(a margin included\)'):
        preflight.check()
    replace(preflight, device_budget=101).check()


def test_a_lazy_layer_sparse_gradients_and_differentiable_updates_are_refused(tmp_path):
    lazy, sparse = decoder(blocks=2), decoder(blocks=2)
    lazy.blocks[1].more = nn.LazyLinear(4)
    sparse.table = nn.Embedding(3, 4, sparse=True)
    with refused(tmp_path, ModelNotSupported, r"blocks\.1\.more\.weight has no shape yet"):
        offload(tmp_path, lazy, torch.optim.SGD(lazy.parameters()))
    with refused(tmp_path, ModelNotSupported, r"table makes sparse gradients"):
        offload(tmp_path, sparse)
    model = decoder(blocks=2)
    with refused(tmp_path, OptimizerNotSupported, "differentiable=True"):
        offload(tmp_path, model, torch.optim.AdamW(model.parameters(), differentiable=True))


@pytest.mark.parametrize(
    "options, said", [({"top_k": 0}, "top_k = 0"), ({"temperature": -1.0}, "temperature = -1.0")]
)
def test_a_way_to_draw_tokens_that_is_none_is_refused(options, said):
    with pytest.raises(BadInput, match=said):
        chooser(**{"temperature": 1.0, "top_k": None, "seed": 0, **options})


@pytest.mark.parametrize("top_k, drawn", [(1, {4}), (2, {3, 4}), (99, {0, 1, 2, 3, 4})])
def test_tokens_are_drawn_from_the_likeliest_alone(top_k, drawn):
    choose = chooser(1.0, top_k, 0)
    assert {int(choose(torch.arange(5.0) / 10)) for _ in range(200)} == drawn
