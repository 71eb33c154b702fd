"""FSDP1 holds stretches of flattened parameters: what is not known to be told rightly is refused by name."""

from __future__ import annotations

import pytest

from combined import one_in, some_of
from dist.world import World


def refused(world, root, **order) -> str:
    """What all of two ranks are told, before anything is written."""
    said = world.run(2, root=root, steps=2, **order)
    for each in said:
        assert "error" in each, each
        assert "at" not in each
    assert not root.exists()
    [text] = {each["error"] for each in said}
    return text


WRAPPED = {
    "fsdp1 flat": "use_orig_params=True",
    "fsdp1 offload": "Leave out cpu_offload=",
    "fsdp1 buffers": "Leave out buffer_dtype=",
    "fsdp1 lowgrads": "Leave out keep_low_precision_grads=",
    "fsdp1 strided": "first.weight is of",
}


@pytest.mark.parametrize("kind, width", some_of(3, [*((kind, 12) for kind in WRAPPED), ("fsdp1 flat", 0)]))
def test_what_a_wrapper_does_otherwise_is_refused_on_all_ranks(world, tmp_path, kind, width):
    """Width 0 is one parameter, of which two ranks have as much: it would be taken for copies."""
    text = refused(world, tmp_path / "run", kind=kind, width=width)
    assert text.startswith("ModelNotSupported: the model"), text
    assert "is of FullyShardedDataParallel (FSDP1), and " in text
    assert WRAPPED[kind] in text
    assert "keeps its books" not in text


@pytest.mark.parametrize("kind", ["fsdp1 hybrid", "fsdp1 apart"])
def test_ranks_that_average_no_gradients_are_refused_on_all(world, tmp_path, kind):
    """Of a replica of one rank torch makes one that exchanges nothing: what each has is its own, and no copy."""
    text = refused(world, tmp_path / "run", kind=kind)
    assert text.startswith("ModelNotSupported: ") and "(FSDP1) on 2 ranks" in text, text
    assert "its gradients are averaged over 1 of them" in text


@pytest.mark.parametrize("kind, width", one_in(2, ["fsdp1 inside", "fsdp1 flat inside"], [0, 12]))
def test_the_inside_of_a_wrapper_is_refused_on_all_ranks(world, tmp_path, kind, width):
    name = "_flat_param" if "flat" in kind else "scale" if width else "weight"
    text = refused(world, tmp_path / "run", kind=kind, width=width)
    assert text.startswith(f"ModelNotSupported: {name} is of FullyShardedDataParallel (FSDP1)"), text
    assert "Give the wrapped model" in text


OPTIONS = {
    "clip_norm": ({"clip_norm": 1.0}, "model.clip_grad_norm_(max_norm)"),
    "codec": ({"codec": ["topk", 0.5]}, "codec=TopK"),
    "replica": ({"replica": True}, "replica= is not for scale"),
    "after_update": ({"spoilt": "by after_update"}, "after_update= is not for scale"),
    "averages": ({"spoilt": "by averages"}, "averages= is not for scale"),
    "8bit": ({"optimizer": "8bit"}, "AdamW8bit is not known"),
    "global": ({"optimizer": "global"}, "Global is not known"),
    "adafactor": ({"optimizer": "adafactor"}, "Adafactor is not known"),
}


@pytest.mark.parametrize("option", some_of(4, list(OPTIONS)))
def test_an_option_that_needs_whole_tensors_is_refused_on_all_ranks(world, tmp_path, option):
    order, told = OPTIONS[option]
    text = refused(world, tmp_path / "run", kind="fsdp1 layers", **order)
    assert text.startswith("BadInput: ") and "FSDP1" in text, text
    assert told in text


@pytest.fixture(scope="module")
def cases():
    with World("flattened") as world:
        yield world


def told(cases, tmp_path, case: str, ranks: int = 2) -> list[dict]:
    said = cases.run(ranks, case=case, root=tmp_path / "run")
    for each in said:
        assert each.get("finished"), each
    return said


def test_steps_and_bases_are_refused_while_parameters_are_gathered(cases, tmp_path):
    for each in told(cases, tmp_path, "gathered"):
        for what in ("save", "step"):
            assert "is not this rank's part of it at the moment" in each[what], each
            assert "outside of summon_full_params()" in each[what]


def test_ranks_whose_parts_are_not_the_whole_are_refused_on_all(cases, tmp_path):
    for each in told(cases, tmp_path, "unlike"):
        assert each["refused"].startswith("ModelNotSupported: the ranks hold the elements "), each
        assert "together that is not each of it once" in each["refused"]
        assert not each["there"]


def test_what_trained_on_another_rank_alone_is_not_told_as_frozen(cases, tmp_path):
    for each in told(cases, tmp_path, "thawed"):
        assert (each["resumed"], each["told"]) == (5, [])


def test_what_is_done_to_gathered_parameters_is_part_of_the_run(cases, tmp_path):
    for each in told(cases, tmp_path, "written back"):
        assert (each["resumed"], each["again"]) == (6, each["before"])
        assert each["losses"] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("case, ranks", one_in(2, ["tied", "scalar", "nested", "tiny"], [2, 3]))
def test_models_that_are_odd_come_back_wrapped_and_not(cases, tmp_path, case, ranks):
    for each in told(cases, tmp_path, case, ranks):
        assert each["again"] == each["plain"] == each["before"]
        assert each["steps"] == [3, 3]


def test_books_that_say_something_else_are_not_believed(cases, tmp_path):
    for each in told(cases, tmp_path, "books"):
        assert each["told"].pop("as they are") == ""
        for what, text in each["told"].items():
            assert text.startswith("ModelNotSupported: the model is of FullyShardedDataParallel"), (
                what,
                text,
            )
            assert "keeps its books otherwise than is known here" in text, (what, text)
