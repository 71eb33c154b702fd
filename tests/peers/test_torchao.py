"""torchao's optimizers of 8 and 4 bits and fp8 under FSDP2: killed, resumed to the bit, also on other ranks."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from dist.world import World, ended
from formats.test_saved import exact
from holdfast.checkpointer import Checkpointer
from holdfast.cli.main import app
from holdfast.errors import ModelNotSupported
from holdfast.optim import Joined
from holdfast.state.layout.regions import Region
from holdfast.state.quantised_slots import refuse_unequal_quantisation

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not there (make test-peers)"),
]

KINDS = ["OptimState4bit", "OptimState8bit", "OptimStateFp8", "Tensor"]
STEPS = 8


@pytest.fixture(scope="module")
def train():
    """Train in a directory with so many ranks, and get what each said."""
    with World("low_bit") as world:
        yield lambda ranks, root, **order: world.run(ranks, root=root, **{"steps": STEPS, **order})


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """A run of two ranks that nobody disturbed, saved after its last step, and what they said. Beside it is torch's."""
    root = tmp_path_factory.mktemp("whole") / "run"
    return root, ended(train(2, root, save=True, folder=root.with_name("dcp")))[0]


def test_a_killed_run_continues_bit_for_bit(train, whole, tmp_path):
    assert whole[1]["kinds"] == KINDS
    died = train(2, tmp_path, kill=[1, 6])
    assert died[1]["code"] == -9
    rest = ended(train(2, tmp_path))[0]
    assert rest["resumed"] == 5 and rest["kinds"] == KINDS  # the base of step 3 and its records
    assert rest["digests"].items() <= whole[1]["digests"].items() and rest["rate"] == whole[1]["rate"]


def begun_from(run, tmp_path):
    """Resume the run itself, or begin with the run, or with what torch saved."""
    shutil.copytree(run, tmp_path / "run")
    sources = {"other": run, "third": run.with_name("dcp")}
    return [{"root": tmp_path / "run"}, *({"root": tmp_path / k, "source": v} for k, v in sources.items())]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("ranks", [4, 1])
def test_other_ranks_take_whole_blocks(train, whole, tmp_path, ranks):
    """Four hold parts that torchao would not quantise anew."""
    for how in begun_from(whole[0], tmp_path):
        said = ended(train(ranks, **how))[0]
        assert said["digests"] == {"8": whole[1]["digests"]["8"]} and said["kinds"] == KINDS


def test_a_border_inside_a_block_is_refused(train, whole, tmp_path):
    for how in begun_from(whole[0], tmp_path)[::2]:
        for said in train(3, **how):
            assert "RunMismatch" in said["error"] and "0.weight" in said["error"], said
            assert "blocks of 256 elements" in said["error"] and said["untouched"]


def test_parts_that_only_some_ranks_quantise_are_refused(train, tmp_path):
    for said in train(2, tmp_path / "run", rows=129):
        assert "ModelNotSupported" in said["error"] and "0.weight" in said["error"], said
        assert not (tmp_path / "run" / "commits").exists()


def test_parts_of_columns_are_refused():
    """Their blocks are none of the whole, even if all ranks quantise them."""
    weight = torch.nn.Parameter(torch.zeros(128, 64))
    halves = [{"w": Region((0, first), (128, first + 32))} for first in (0, 32)]
    refused = partial(
        refuse_unequal_quantisation,
        [optimizer_of("AdamW8bit", [weight])],
        {id(weight): "w"},
        {"w": (128, 64)},
    )
    with pytest.raises(ModelNotSupported, match="AdamW8bit would keep its state of w"):
        refused(halves)
    refused([{"w": Region((first, 0), (first + 64, 64))} for first in (0, 64)])


def test_parts_of_joined_optimizers_are_looked_at_too():
    weight = torch.nn.Parameter(torch.zeros(129, 64))
    uneven = [{"w": Region((0, 0), (65, 64))}, {"w": Region((65, 0), (129, 64))}]
    optimizer = Joined(optimizer_of("AdamW8bit", [weight]))
    with pytest.raises(ModelNotSupported, match="only some"):
        refuse_unequal_quantisation([optimizer], {id(weight): "w"}, {"w": (129, 64)}, uneven)


def optimizer_of(kind, parameters, **options):
    """One of torchao's, which is imported here alone, as long as it is not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its docstrings, when they are compiled
        from torchao import optim

    return getattr(optim, kind)(parameters, **options)


def test_commands_read_a_run_and_refuse_what_others_could_not_load(whole, tmp_path):
    def said(*arguments):
        return CliRunner().invoke(app, [str(each) for each in arguments])

    shown = said("show", whole[0]).output
    assert "exp_avg.codes" in shown and "exp_avg_sq.scale" in shown
    assert said("convert", whole[0], tmp_path / "run", "--to", "holdfast").exit_code == 0
    assert "bit for bit" in said("diff", whole[0], tmp_path / "run").output
    same = said("diff", whole[0], whole[0].with_name("dcp"))
    assert same.exit_code == 0 and "bit for bit" in same.output, same.output
    for to in ("torch", "dcp", "deepspeed"):
        assert said("convert", whole[0], tmp_path / f"{to}.pt", "--to", to).exit_code == 1
        assert not (tmp_path / f"{to}.pt").exists()


@pytest.mark.filterwarnings("ignore:beginning from .* it has no random numbers")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_training_goes_on_from_what_torch_saved(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def made(seed, steps):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.ReLU(), torch.nn.Linear(80, 64))
        optimizer = optimizer_of(kind, model.parameters(), lr=0.01 * seed)
        go_on(model, optimizer, steps)
        return model, optimizer

    def go_on(model, optimizer, steps):
        for number in range(steps):
            torch.manual_seed(number)
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def opened(state):
        """A state dict with the tensors inside of those that torchao made."""
        if isinstance(state, dict):
            return {key: opened(value) for key, value in state.items()}
        return vars(state) if hasattr(state, "codes") else state

    there, here = made(1, 2), made(2, 1)
    file = tmp_path / "a.pt"
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict(), "step": 2}, file)
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=file) == 2
    for _ in range(2):
        assert [exact(opened(p.state_dict())) for p in here] == [exact(opened(p.state_dict())) for p in there]
        for parts in (here, there):
            go_on(*parts, 2)
