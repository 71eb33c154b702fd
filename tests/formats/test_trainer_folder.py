"""A checkpoint of the Trainer is a whole state: its optimizer's numbers become names, or are left with a reason."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from formats.test_saved import exact, tensors_of  # noqa: E402
from holdfast.checkpointer import Checkpointer  # noqa: E402
from holdfast.errors import Damaged, HoldfastError  # noqa: E402
from holdfast.formats.foreign_formats import open_source  # noqa: E402
from holdfast.formats.load import check_all  # noqa: E402
from holdfast.state.encoding import decode  # noqa: E402
from tiny_folders import gpt2, llama_tied  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def bert():
    """Biases, LayerNorms and a classifier: parameters that do not decay lie between those that do."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=320))


def mamba():
    """Vectors that decay beside those that do not: shapes alone do not tell the groups."""
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 320}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, use_cache=False))


def trained(make, folder, steps=2, **options):
    """A trainer that has saved ``checkpoint-N`` at its end."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = make()
    rows = [{"input_ids": [5, number, 7], "labels": 1} for number in range(8)]
    if not isinstance(model, transformers.BertForSequenceClassification):
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, save_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        weight_decay=0.1, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return trainer, folder / f"checkpoint-{steps}"


def state_of(model, optimizer):
    """The optimizer's state and its groups, by names."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = {names[id(p)]: exact(held) for p, held in optimizer.state.items()}
    rates = [
        (sorted(names[id(p)] for p in group["params"]), group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
    ]
    return exact(model.state_dict()), state, rates


@pytest.fixture(scope="module")
def of_gpt2(tmp_path_factory):
    return trained(gpt2, tmp_path_factory.mktemp("gpt2"))


@pytest.mark.parametrize("make", [gpt2, llama_tied, bert, mamba])
def test_a_training_goes_on_from_a_checkpoint_of_the_trainer(tmp_path, make):
    trainer, folder = trained(make, tmp_path / "trainer")
    here = make()
    decayed = trainer.get_decay_parameter_names(here)
    groups = [
        {"params": [p for n, p in here.named_parameters() if n not in decayed], "weight_decay": 0.5},
        {"params": [p for n, p in here.named_parameters() if n in decayed], "weight_decay": 0.7},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with Checkpointer(tmp_path / "run", model=here, optimizer=optimizer, scheduler=schedule) as checkpointer:
        assert checkpointer.resume(source=folder) == 2
    theirs = state_of(trainer.model, trainer.optimizer.optimizer)
    ours = state_of(here, optimizer)
    assert ours[:2] == theirs[:2] and sorted(ours[2]) == sorted(theirs[2])
    assert schedule.last_epoch == 2


def test_random_numbers_go_on_where_the_trainer_saved_them(of_gpt2):
    saved = torch.load(of_gpt2[1] / "rng_state.pth", weights_only=False)
    found = decode(open_source(of_gpt2[1]).progress["random"])
    version, words, gauss = found["python"]
    assert (version, tuple(int(word) for word in words), gauss) == saved["python"]
    assert exact(found["torch"]) == exact(saved["cpu"])
    assert [np.asarray(each).tolist() for each in found["numpy"]] == [
        np.asarray(e).tolist() for e in saved["numpy"]
    ]


def test_an_optimizer_with_names_needs_no_model(of_gpt2, tmp_path):
    shutil.copytree(of_gpt2[1], tmp_path / "folder")
    (tmp_path / "folder/config.json").write_text("{}")
    trainer = of_gpt2[0]
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    state = trainer.optimizer.optimizer.state_dict()
    for group, live in zip(state["param_groups"], trainer.optimizer.param_groups, strict=True):
        group["param_names"] = [names[id(p)] for p in live["params"]]
    torch.save(state, tmp_path / "folder/optimizer.pt")
    assert exact(tensors_of(open_source(tmp_path / "folder"))) == exact(tensors_of(open_source(of_gpt2[1])))


def without_model(folder):
    (folder / "config.json").unlink()


def of_another_class(folder):
    change(folder / "config.json", architectures=["NoSuchModel"])


def with_code(folder):
    change(folder / "config.json", auto_map={"AutoConfig": "code.Config"})


def of_more_layers(folder):
    change(folder / "config.json", n_layer=10**9)


def of_one_layer_less(folder):
    change(folder / "config.json", n_layer=2)


def in_other_groups(folder):
    state = torch.load(folder / "optimizer.pt")
    one, other = state["param_groups"]
    other["params"] = [one["params"].pop(), *other["params"]]
    torch.save(state, folder / "optimizer.pt")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "spoil",
    [without_model, of_another_class, with_code, of_more_layers, of_one_layer_less, in_other_groups],
)
def test_an_order_that_cannot_be_told_leaves_the_weights_and_says_why(of_gpt2, tmp_path, spoil):
    folder = tmp_path / "folder"
    shutil.copytree(of_gpt2[1], folder)
    spoil(folder)
    source = open_source(folder)
    assert {each.atom.slot for each in source.atoms.values()} == {"param"}
    assert any(each.startswith("optimizer.pt (") for each in source.unread)
    assert "step" not in source.progress


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_file_of_another_step_is_refused(of_gpt2, tmp_path, name):
    folder = tmp_path / "folder"
    shutil.copytree(of_gpt2[1], folder)
    _, other = trained(gpt2, tmp_path / "other", steps=1)
    shutil.copy(other / name, folder / name)
    with pytest.raises(Damaged, match="the files are of different saves"):
        open_source(folder)


@pytest.mark.slow
def test_damaged_files_are_never_another_state(of_gpt2, tmp_path):
    """30 files cut short or with a flipped bit, of those that torch.save wrote."""
    draw, whole = random.Random(3), None
    names = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]
    for number in range(31):
        folder = tmp_path / str(number)
        shutil.copytree(of_gpt2[1], folder)
        path = folder / draw.choice(names)
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        if number:
            path.write_bytes(data)
        try:
            source = open_source(folder)
            check_all(source, range(len(source.parts)))
            found = exact(tensors_of(source)), {k: v for k, v in source.progress.items() if k != "extra"}
        except HoldfastError:
            assert number
            continue
        whole = found if number == 0 else whole
        assert found == whole, (path.name, number)
        shutil.rmtree(folder)
