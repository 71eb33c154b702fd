"""Live engines of the real DeepSpeed begin from what no ZeRO wrote, and refuse what they cannot begin from, or tell."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from peers.launching import deepspeed
from peers.odd_model import Model, groups_of, loss_of, tokens_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

LIVE = "peers.live_run"
FROZEN = ("frozen.weight", "frozen.bias")


def plain_steps(model, optimizer, first, steps, after=lambda: None, skipped=()):
    """The losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parameter in model.named_parameters():
            if (name, step) in skipped:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    return losses


def plain_run(folder, skipped=()):
    """What a run of one process has after three steps, and the losses of the next three."""
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model))
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        plain_steps(model, optimizer, 0, 3, checkpointer.step, skipped)
    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held[f"{name}/param"] = parameter.detach().clone()
            held |= {
                f"{name}/{slot}": optimizer.state[parameter][slot].clone()
                for slot in ("exp_avg", "exp_avg_sq")
            }
    module = {name: value.clone() for name, value in model.state_dict().items()}
    return held, module, plain_steps(model, optimizer, 3, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def plain(root):
    return plain_run(root / "plain")


@pytest.fixture(scope="module")
def weights(root):
    """Those of a Hugging Face folder, and its first losses; in another they have 16 bits and other names."""
    torch.manual_seed(5)
    model = Model()
    model.seen += 9
    kept = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    for folder, tensors in {
        "hf": kept,
        "hf-16": {f"inner.{n}": v.bfloat16() if v.is_floating_point() else v for n, v in kept.items()},
    }.items():
        (root / folder).mkdir()
        save_file(tensors, root / folder / "model.safetensors", metadata={"format": "pt"})
    return kept, plain_steps(model, torch.optim.AdamW(groups_of(model)), 0, 3)


@pytest.fixture(scope="module")
def begun(root, plain, weights):
    """What each live engine told, by name."""
    anew = {"unscheduled": True, "trained": 1}
    renamed = {"rename": {"(.*)": r"inner.\1"}, "cast": True}
    two = [
        {"do": "fsdp2", "name": "fsdp2", "run": str(root / "fsdp2")},
        {"name": "plain-1", "source": str(root / "plain"), "stage": 1, **anew},
        {"name": "plain-2-bf16", "source": str(root / "plain"), "stage": 2, "dtype": "bf16",
         "options": {"cast": True}, **anew},
        {"name": "step-3", "source": str(root / "plain@2"), "stage": 3, **anew},
        {"name": "hf-3", "source": str(root / "hf"), "stage": 3, **anew},
        {"name": "hf-16-2", "source": str(root / "hf-16"), "stage": 2, "options": renamed, **anew},
    ]  # fmt: skip
    three = [
        {"name": "plain-3", "source": str(root / "plain"), "stage": 3,
         "zero": {"stage3_param_persistence_threshold": 200}, **anew},
        {"name": "fsdp2-2", "source": str(root / "fsdp2"), "stage": 2, **anew},
        {
            "name": "fsdp2-3",
            "source": str(root / "fsdp2"),
            "stage": 3,
            "zero": {"sub_group_size": 50},
            **anew,
        },
        {"name": "hf-1", "source": str(root / "hf"), "stage": 1, **anew},
    ]  # fmt: skip
    return deepspeed(root, 2, two, LIVE) | deepspeed(root, 3, three, LIVE)


def assert_same(found, told):
    assert found.keys() == told.keys()
    for key, tensor in told.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["plain-1", "plain-2-bf16", "plain-3"])
def test_from_a_run_of_one_process(plain, begun, name):
    held, module, losses = plain
    told = begun[name]
    assert (told["refused"], told["start"], told["counters"]) == (None, 3, (3, 36, 0, 3))
    assert_same(told["tensors"], held)
    assert told["working_alike"] and set(told["steps"]) == {3.0} and not told["linked"]
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    rounded = {n: v.to(dtype) if v.is_floating_point() else v for n, v in module.items()}
    assert_same(told["working"], rounded)
    assert told["losses"] == pytest.approx(losses, rel=1e-6 if dtype == torch.float32 else 2e-2)


def test_from_a_step_that_records_lead_to(begun):
    assert begun["step-3"]["start"] == 2 and set(begun["step-3"]["steps"]) == {2.0}


@pytest.mark.parametrize("name", ["fsdp2-2", "fsdp2-3"])
def test_from_a_run_of_fsdp2(plain, begun, name):
    """Which went on as one process did, but for the order of sums."""
    held, _, losses = plain
    told = begun[name]
    assert told["start"] == 3 and set(told["steps"]) == {3.0} and told["working_alike"]
    assert told["tensors"].keys() == held.keys()
    for key, tensor in held.items():
        assert torch.allclose(told["tensors"][key], tensor, rtol=1e-3, atol=1e-6), key
    assert told["losses"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("name", ["hf-1", "hf-3"])
def test_from_weights_alone(weights, begun, name):
    kept, losses = weights
    told = begun[name]
    assert (told["refused"], told["start"], told["counters"]) == (None, 0, (0, 0, 0, 0))
    assert_same({k: v for k, v in told["working"].items() if k != "head.weight"}, kept)
    assert told["steps"] == [] and told["working_alike"]
    assert told["losses"] == pytest.approx(losses, rel=1e-6)
    assert any("hyper-parameters" in text for text in told["warned"])


def test_from_weights_of_other_names_and_another_type(weights, begun):
    kept, _ = weights
    found = begun["hf-16-2"]["working"]
    rounded = {n: v.bfloat16().float() if v.is_floating_point() else v for n, v in kept.items()}
    assert_same({k: v for k, v in found.items() if k != "head.weight"}, rounded)


BROKEN = {
    "mapping": ({"stage": 2}, "ModelNotSupported", "where a fragment lies"),
    "moved": ({"stage": 1}, "ModelNotSupported", "where a parameter"),
    "size": ({"stage": 1}, "ModelNotSupported", "how large a share"),
    "position": ({"stage": 3}, "ModelNotSupported", "where in its sub-group"),
    "without a book": ({"stage": 3}, "ModelNotSupported", "AttributeError"),
    "accumulating": ({"stage": 2}, "BadInput", "gradients are being accumulated"),
    "counted by another": ({"stage": 1}, "BadInput", "gradients are being accumulated"),
    "before the step": ({"stage": 3}, "BadInput", "gradients are being accumulated"),
    "experts": ({"stage": 2}, "ModelNotSupported", "experts"),
    "pipeline": ({"stage": 1}, "ModelNotSupported", "pipeline"),
    "tensor parallel": ({"stage": 3}, "ModelNotSupported", "tensor parallel"),
    "offloaded": ({"stage": 3}, "ModelNotSupported", "offload"),
    "other rank": ({"stage": 3}, "ModelNotSupported", "each of it once"),
}
"""What is done to an engine, and how it is refused."""


@pytest.fixture(scope="module")
def refused(root, plain):
    """What was refused, by name."""
    plain_run(root / "unlike", skipped={("norm.weight", 1)})
    good = {"source": str(root / "plain"), "trained": 1, "unscheduled": True}
    jobs = [{**good, "name": f"broken {how}", "break": how, **job} for how, (job, _, _) in BROKEN.items()]
    jobs += [{**good, "name": "saved broken", "break": "moved", "stage": 1, "only_saves": True,
              "run": str(root / "never")},
             {"name": "saved elsewhere", "stage": 2, "only_saves": True, "run": str(root / "plain")}]  # fmt: skip
    for stage in (1, 3):
        jobs += [
            {**good, "name": f"unlike {stage}", "source": str(root / "unlike"), "stage": stage},
            {**good, "name": f"16 bits {stage}", "stage": stage, "dtype": "bf16"},
            {**good, "name": f"adafactor {stage}", "stage": stage, "optimizer": "Adafactor"},
            {**good, "name": f"other optimizer {stage}", "stage": stage, "sgd": True},
            {**good, "name": f"nothing {stage}", "source": str(root / "nothing"), "stage": stage},
        ]
    jobs += [{**good, "name": "off", "stage": 0},
             {**good, "name": "stepped by another", "break": "stepped by another", "stage": 2, "steps": 0}]  # fmt: skip
    return deepspeed(root, 2, jobs, LIVE)


def assert_refused(told, kind, text):
    assert len(told["refused"]) == 2
    for failed, unchanged in told["refused"]:
        assert unchanged and failed.startswith((f"{kind}: ", "RankFailed: ")) and text in failed, failed
    assert any(failed.startswith(kind) for failed, _ in told["refused"])


@pytest.mark.parametrize("how", BROKEN)
def test_books_that_say_something_else_are_refused_before_anything_is_touched(refused, how):
    _, kind, text = BROKEN[how]
    assert_refused(refused[f"broken {how}"], kind, text)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("unlike", "RunMismatch", "one flat tensor"),
        ("16 bits", "RunMismatch", "cast=True"),
        ("adafactor", "OptimizerNotSupported", "Adafactor"),
        ("other optimizer", "RunMismatch", "another kind of optimizer"),
        ("nothing", "BadInput", "nothing"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_on_all_ranks_with_nothing_touched(
    refused, stage, name, kind, text
):
    assert_refused(refused[f"{name} {stage}"], kind, text)


def test_an_engine_whose_steps_another_counts_is_whole_behind_one(refused):
    assert refused["stepped by another"]["refused"] is None


def test_zero_that_is_off_is_refused(refused):
    assert_refused(refused["off"], "ModelNotSupported", "stage 0")


def test_a_save_into_a_run_that_something_else_wrote_is_refused(root, refused):
    assert_refused(refused["saved elsewhere"], "RunMismatch", "integrations.deepspeed.save did not write")


def test_a_save_of_what_cannot_be_told_writes_nothing(root, refused):
    assert_refused(refused["saved broken"], "ModelNotSupported", "where a parameter")
    assert not (root / "never").exists()
