"""The scripts of the guides run as they stand, are stopped, go on, and end as the script before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

import lightning as L
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from formats.deepspeed_files import State, write
from integrations_interrupt import close_engines
from offloaded_script import Texts
from support.guides import GUIDES, Stopped, StoppedData, call, commands, run, scripts
from survive_run import digest
from tiny_folders import write_folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # of the trainers
SAMPLES = [Texts()[i] for i in range(12)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    close_engines()


def convert(guide):
    for command in commands(guide, "convert"):
        call(command)


def test_from_trainer():
    write_folder(Path("FOLDER"), dtype=torch.float32)
    before, kept, out_of_core = scripts("from-trainer")
    run(before, data=SAMPLES)
    expected = load_file("tuned/model.safetensors")
    for script in (kept, out_of_core):
        Path("tuned/model.safetensors").unlink()
        run(script, is_stopped=True, data=StoppedData(SAMPLES, 20))
        run(script, data=SAMPLES)
        found = load_file("tuned/model.safetensors")
        if script == kept:
            assert digest(found) == digest(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
        close_engines()
    convert("from-trainer")
    assert digest(load_file("OUT/model.safetensors")) == digest(expected)


def accelerated(script, samples=SAMPLES, **how):
    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)
    model = LlamaForCausalLM.from_pretrained("FOLDER")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
    loader = DataLoader(samples, batch_size=2, shuffle=True)
    try:
        run(script, model=model, optimizer=optimizer, loader=loader, scheduler=schedule, **how)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return digest(model.state_dict())


def test_from_accelerate():
    write_folder(Path("FOLDER"), dtype=torch.float32)
    before, after = scripts("from-accelerate")
    expected = accelerated(before)
    accelerated(after, StoppedData(SAMPLES, 17), is_stopped=True)
    assert accelerated(after) == expected
    convert("from-accelerate")
    assert digest(torch.load("ckpt.pt")["model"]) == expected


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.3), nn.Linear(5, 3))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightened(script, samples, **how):
    module = Module()
    run(script, module=module, loader=DataLoader(samples, batch_size=3, shuffle=True), **how)
    return digest(module.state_dict())


def test_from_lightning():
    points = [torch.linspace(-1, 1, 7) * i for i in range(12)]
    before, after = scripts("from-lightning")
    expected = lightened(before, points)
    lightened(after, StoppedData(points, 17), is_stopped=True)
    assert lightened(after, points) == expected
    convert("from-lightning")
    assert digest(torch.load("ckpt.pt")["model"]) == expected


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def test_from_deepspeed():
    torch.manual_seed(0)
    model = Model()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {
        slot: {name: torch.rand(t.shape) / 100 for name, t in masters.items()}
        for slot in ("exp_avg", "exp_avg_sq")
    }
    write("ds_run", State([masters], moments), 3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for name, p in model.named_parameters():
        optimizer.state[p] = {"step": torch.tensor(7.0)} | {
            slot: moments[slot][name].clone() for slot in moments
        }
    batches = {step: [{"x": torch.randn(3, 4)}, {"x": torch.randn(3, 4)}] for step in range(9, 12)}
    for step in batches.values():  # the folder is of step 9, of which 2 were skipped
        for batch in step:
            (model(**batch) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def stopping(step):
        if step == 10:
            raise Stopped
        return batches[step]

    [after] = scripts("from-deepspeed")
    run(after, is_stopped=True, Model=Model, micro_batches=stopping)
    close_engines()
    ended = run(after, Model=Model, micro_batches=batches.__getitem__)
    assert ended["engine"].steps_done == 12
    convert("from-deepspeed")
    call("holdfast diff runs/mine ds_new")
    call("holdfast convert runs/mine ended.pt --to torch")
    for name, tensor in torch.load("ended.pt")["model"].items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_from_peft():
    Path("FOLDER").mkdir()
    [command] = commands("from-peft", "train")
    assert "rank = 16" in call(command, "--print-config")


def test_from_axolotl():
    recipe = re.search(r"```toml\n(.*?)```", (GUIDES / "from-axolotl.md").read_text(), re.DOTALL)[1]
    Path("recipe.toml").write_text(recipe)
    Path("FOLDER").mkdir()
    [command] = [each for each in commands("from-axolotl", "train") if "print-config" in each]
    assert 'wandb = "mine"' in call(command)
