"""DeepSpeed's checkpoints are read bit for bit, whatever their partitions; what is not of one checkpoint is refused.

The files here are made field by field; real ones are read in ``tests/peers``.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from combined import one_in
from formats.deepspeed_files import load, random_state, save, write
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, FileMissing
from holdfast.formats.deepspeed.deepspeed_contents import is_deepspeed
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import read_flat
from holdfast.state.encoding import decode

SHAPES = [
    {"embed.weight": (37, 10), "up.weight": (13, 10), "down.weight": (7, 13)},
    {"up.bias": (13,), "s": (1,)},
]


def state_of(groups=SHAPES, **about):
    beside = {
        "frozen": {"frozen.weight": torch.randn(13, 3)},
        "buffers": {"seen": torch.arange(3)},
        "shared": {"head.weight": "embed.weight"},
    }
    return random_state(groups, **{**beside, **about})


def bits(source):
    return {
        key: (stored.atom.shape, read_flat(source, stored, 0, stored.atom.elements).tobytes())
        for key, stored in source.atoms.items()
    }


def expected(state):
    return {
        key: (tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in state.expected.items()
    }


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {}), (2, {}), (3, {}), (3, {"sub_group": 60}),
        (1, {"alignment": 4}), (2, {"alignment": 8}), (2, {"deal": True}), (2, {"deal": True, "alignment": 4}),
        (1, {"stripped": False}), (1, {"mappings": False}), (2, {"elastic": True}),
    ],
)  # fmt: skip
def test_every_tensor_of_every_layout_is_what_it_was(tmp_path, stage, world, options):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = state_of(dtype=dtype)
        root = tmp_path / str(dtype)
        write(root, state, stage, world, **options)
        assert bits(open_source(root)) == expected(state)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_shapes_in_any_groups_on_any_world(data):
    shapes = st.lists(st.integers(1, 17), max_size=4).filter(lambda shape: len(shape) < 4 or max(shape) < 6)
    sizes = data.draw(st.lists(st.lists(shapes, min_size=1, max_size=5), min_size=1, max_size=3))
    groups = [{f"{g}.{i}": shape for i, shape in enumerate(group)} for g, group in enumerate(sizes)]
    state = random_state(groups, seed=data.draw(st.integers(0, 99)))
    stage, world = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 9))
    if stage == 3:
        options = {"sub_group": data.draw(st.sampled_from([1, 10, 100, 10**9]))}
    else:
        options = {"alignment": data.draw(st.sampled_from([1, 4, 8])), "deal": data.draw(st.booleans())}
    with tempfile.TemporaryDirectory() as root:
        write(root, state, stage, world, **options)
        assert bits(open_source(Path(root))) == expected(state)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_around_the_tensors_is_there_too(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 3)
    source = open_source(folder)
    assert (source.path, source.format) == (str(folder), f"deepspeed zero-{stage}")
    progress = source.progress
    assert progress["step"] == 9 and progress["optimizer"] == "AdamW"  # two of them skipped
    assert [decode(group) for group in progress["groups"]] == [state_of().hyper_parameters(g) for g in (0, 1)]
    assert progress["group_parameters"] == [list(group) for group in SHAPES]
    assert progress["scheduler"] == {"last_batch_iteration": 6}
    assert source.aliases == {"head.weight": "embed.weight"}
    extra = progress["extra"]
    assert (extra["epoch"], extra["skipped_steps"], extra["global_samples"]) == (4, 2, 108)
    assert extra["loss_scaler"]["fields"] == {"cur_scale": 1.0, "dynamic": False}


def test_a_count_of_steps_that_is_a_number_is_read_as_torchs_optimizers_have_it(tmp_path):
    state = state_of(step_is_tensor=False)
    write(tmp_path, state, 2, 2)
    assert bits(open_source(tmp_path)) == expected(state)


def test_an_optimizer_of_other_state_is_read_as_it_is(tmp_path):
    for stage in (1, 3):
        state = state_of(slots=("momentum_buffer",), step=None)
        write(tmp_path / str(stage), state, stage, 3)
        assert bits(open_source(tmp_path / str(stage))) == expected(state)


def test_names_of_wrappers_are_left_out(tmp_path):
    groups = [{"module._orig_mod.a": (3,), "module._orig_mod.module.b": (2, 2)}]
    write(tmp_path, random_state(groups), 1, 2)
    assert {stored.atom.name for stored in open_source(tmp_path).atoms.values()} == {"a", "module.b"}


def test_two_names_that_become_one_are_refused(tmp_path):
    write(tmp_path, random_state([{"a._orig_mod.w": (3,), "a.w": (2, 2)}]), 1, 2)
    with pytest.raises(BadInput, match=r"a\._orig_mod\.w and a\.w are both a\.w"):
        open_source(tmp_path)


def test_tensors_of_the_clients_state_are_carried_if_small_and_named_if_not(tmp_path, monkeypatch):
    from holdfast.formats.deepspeed import deepspeed_contents

    monkeypatch.setattr(deepspeed_contents, "LARGEST_EXTRA", 100)
    folder = write(tmp_path, state_of(), 1, 2)
    model = folder / "mp_rank_00_model_states.pt"
    content = {**load(model), "rng": torch.arange(5), "mean": torch.zeros(99)}
    save(content, model)
    extra = open_source(folder).progress["extra"]
    assert torch.equal(decode(extra["rng"]), torch.arange(5))
    assert extra["mean"]["shape"] == [99] and extra["not_carried"] == ["mean"]


def test_folders_are_known_by_their_files(tmp_path):
    folder = write(tmp_path / "run", state_of(), 3, 2)
    assert is_deepspeed(folder) and is_deepspeed(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latest").write_text("../run/global_step7")
    assert (
        not is_deepspeed(tmp_path / "other")
        and not is_deepspeed(tmp_path)
        and not is_deepspeed(tmp_path / "no")
    )
    (tmp_path / "run" / "latest").write_text("global_step8")
    with pytest.raises(FileMissing, match="names 'global_step8', which is no folder"):
        open_source_at(tmp_path / "run")


def open_source_at(path):
    from holdfast.formats.deepspeed.deepspeed_checkpoints import open_deepspeed

    return open_deepspeed(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_shard_that_is_missing_is_named_each_in_turn(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 4)
    for rank in range(4):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.rename(tmp_path / "away")
        with pytest.raises(FileMissing, match=rf"optimizer's file of data-parallel rank {rank} \(of 4\)"):
            open_source(folder)
        (tmp_path / "away").rename(path)
    if stage == 3:
        (folder / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
        with pytest.raises(FileMissing, match="model states of data-parallel rank 2"):
            open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_shards_that_changed_places_are_refused(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 3)
    one, two = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2))
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with pytest.raises(
        Damaged, match=r"rank_1_mp_rank_00_optim_states\.pt was zero_pp_rank_2_mp_rank_00_optim"
    ):
        open_source(folder)


def test_the_places_of_fragments_tell_shards_that_were_saved_under_other_names(tmp_path):
    folder = write(tmp_path, state_of(), 1, 3)
    one, two = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    contents = [load(path) for path in (one, two)]
    save(contents[1], one)
    save(contents[0], two)
    with pytest.raises(Damaged, match=r"rank_0_.*: its fragment of embed\.weight is"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_two_checkpoints_are_refused_by_name(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 3)
    other = write(tmp_path, state_of(step=8, seed=1), stage, 3, tag="global_step8")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / name).rename(tmp_path / "kept")
    shutil.copy(other / name, folder / name)
    with pytest.raises(Damaged, match=r"rank_1_.*'step' of group 0 is not what it is in other ranks"):
        open_source(folder)
    (tmp_path / "kept").rename(folder / name)
    model = "mp_rank_00_model_states.pt" if stage < 3 else "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(other / model, folder / model)
    said = (
        "is of 8 steps, and the optimizer's files of 7"
        if stage < 3
        else "rank_1_.*global_steps is not what it is"
    )
    with pytest.raises(Damaged, match=said):
        open_source(folder)


def test_an_optimizer_of_later_steps_than_the_model_is_refused(tmp_path):
    folder = write(tmp_path, state_of(), 1, 2)
    other = write(tmp_path, state_of(step=8, seed=1), 1, 2, tag="global_step8")
    shutil.copy(folder / "mp_rank_00_model_states.pt", other)
    with pytest.raises(Damaged, match="is of 7 steps, and the optimizer's files of 8"):
        open_source(other)


def test_an_optimizer_that_was_begun_anew_is_not_refused(tmp_path):
    folder = write(tmp_path, state_of(), 1, 2)
    change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(global_steps=20))
    assert open_source(folder).progress["step"] == 20


def change(path, how):
    content = load(path)
    how(content)
    save(content, path)


@pytest.mark.parametrize(("key", "value"), [("clip_grad", 2.0), ("overflow", True), ("ds_version", "0.18.0")])
def test_ranks_that_say_otherwise_are_refused(tmp_path, key, value):
    folder = write(tmp_path, state_of(), 2, 3)
    path = folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    change(path, lambda content: content["optimizer_state_dict"].update({key: value}))
    with pytest.raises(Damaged, match=f"rank_2_.*: {key} is not what it is in zero_pp_rank_0"):
        open_source(folder)


def test_another_learning_rate_in_one_rank_is_refused(tmp_path):
    folder = write(tmp_path, state_of(slots=("momentum_buffer",), step=None), 3, 2)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    change(
        path,
        lambda content: content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0].update(
            lr=5
        ),
    )
    with pytest.raises(Damaged, match=r"rank_1_.*param_groups is not what it is in"):
        open_source(folder)


@pytest.mark.parametrize(("stage", "said"), [(1, "mp_rank_00"), (3, "zero_pp_rank_0")])
def test_another_world_size_than_the_model_states_say_is_refused(tmp_path, stage, said):
    folder = write(tmp_path, state_of(), stage, 3)
    extra = write(tmp_path / "4", state_of(), stage, 4) / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    shutil.copy(extra, folder)
    with pytest.raises(
        Damaged, match=r"zero_pp_rank_3_mp_rank_00_optim_states\.pt is of data-parallel rank 3"
    ):
        open_source(folder)
    (folder / extra.name).unlink()
    for path in folder.glob("*model_states.pt"):
        change(path, lambda content: content.update(dp_world_size=4))
    with pytest.raises(FileMissing, match=r"rank 3 \(of 4\)"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_another_world_are_refused(tmp_path, stage):
    folder = write(tmp_path / "3", state_of(), stage, 3)
    other = write(tmp_path / "4", state_of(), stage, 4)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, folder / name)
    with pytest.raises((Damaged, BadInput), match=r"rank_1_mp_rank_00_optim_states\.pt"):
        open_source(folder)


def test_a_shard_that_says_that_it_is_one_of_more_is_refused(tmp_path):
    folder = write(tmp_path, state_of(), 3, 3)
    for path in folder.glob("*optim_states.pt"):
        change(path, lambda content: content["optimizer_state_dict"].update(partition_count=6))
    with pytest.raises(Damaged, match=r"rank_0_.* is one of 6 partitions, and there are 3"):
        open_source(folder)


def test_stages_that_are_mixed_are_refused(tmp_path):
    folder = write(tmp_path / "1", state_of(), 1, 2)
    other = write(tmp_path / "3", state_of(), 3, 2)
    for path in other.glob("*optim_states.pt"):
        shutil.copy(path, folder)
    with pytest.raises(Damaged):
        open_source(folder)
    for path in other.glob("*model_states.pt"):
        shutil.copy(path, folder)
    with pytest.raises(Damaged, match="two checkpoints in one folder"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", ["optim", "model"])
def test_files_that_hold_anything_else_are_refused_or_read_as_they_are(tmp_path, stage, place):
    """Whatever is in the place of a field: no error but ours."""
    folder = write(tmp_path, state_of(), stage, 2)
    [path] = (
        folder.glob(f"*rank_1_*{place}*")
        if stage == 3 or place == "optim"
        else folder.glob("*model_states.pt")
    )
    whole, refused = load(path), 0
    fields = whole["optimizer_state_dict"] if place == "optim" else whole
    for key, value in one_in(4, list(fields), (None, 5, "x", [], [None], {}, {"x": 1}, torch.zeros(2))):
        before, fields[key] = fields[key], value
        save(whole, path)
        fields[key] = before
        try:
            open_source(folder)
        except (Damaged, BadInput):
            refused += 1
    assert refused > 5


def test_two_files_of_one_rank_are_refused(tmp_path):
    folder = write(tmp_path, state_of(), 1, 2)
    shutil.copy(
        folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(Damaged, match="are of one rank"):
        open_source(folder)


def test_a_model_without_an_optimizer_is_refused(tmp_path):
    folder = write(tmp_path / "a", state_of(), 1, 2)
    for path in folder.glob("*optim*"):
        path.unlink()
    with pytest.raises(BadInput, match="ZeRO was off"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_state_that_is_not_by_element_is_refused_by_name(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 2)

    def factored(content):
        state = content["optimizer_state_dict"]
        base = state["optimizer_state_dict"] if stage == 3 else state["base_optimizer_state"]
        base["state"][0]["exp_avg_sq_row"] = torch.zeros(5)

    for path in folder.glob("*optim_states.pt"):
        change(path, factored)
    with pytest.raises(BadInput, match=r"keeps 'exp_avg_sq_row', a tensor \[5\]"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_experts_are_refused(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 2)
    key, value = (
        ("partition_count", [2, 1]) if stage == 1 else ("ds_zero_partition_groups", [{"partition_count": 1}])
    )
    for path in folder.glob("*optim_states.pt"):
        change(path, lambda content: content["optimizer_state_dict"].update({key: value}))
    with pytest.raises(BadInput, match="experts"):
        open_source(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_flipped_bit_anywhere_in_the_data_is_found(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 3)
    source = open_source(folder)
    places = [part for part in source.parts if part.path and part.nbytes]
    assert len(places) > 20
    for part in random.Random(3).sample(places, 12):
        path = Path(part.path)
        whole = path.read_bytes()
        data = bytearray(whole)
        data[part.offset + part.nbytes // 2] ^= 16
        path.write_bytes(data)
        with pytest.raises(ChunkCorrupt, match=f"{path.name} at offset {part.offset}"):
            damaged = open_source(folder)
            for number in range(len(damaged.parts)):
                damaged.check(number)
        path.write_bytes(whole)


@pytest.mark.parametrize("stage", [2, 3])
def test_of_a_damaged_partition_nothing_is_given(tmp_path, stage):
    """A parameter is a part of it, of which the checksum says nothing."""
    folder = write(tmp_path, state_of(), stage, 2)
    source = open_source(folder)
    stored = source.atoms["up.weight/exp_avg"]
    [part] = {source.parts[number] for number in stored.pieces.part[:1]}
    data = bytearray(Path(part.path).read_bytes())
    data[part.offset] ^= 1  # of the parameter before it
    Path(part.path).write_bytes(data)
    again = open_source(folder)  # nothing of it is read for that
    with pytest.raises(ChunkCorrupt, match="CRC-32"):
        read_flat(again, stored, 0, stored.atom.elements)
    assert bits_of(open_source(folder), "up.weight/param")


def bits_of(source, key):
    return read_flat(source, source.atoms[key], 0, source.atoms[key].atom.elements).tobytes()


@pytest.mark.parametrize("stage", [1, 3])
def test_files_that_were_cut_short_or_lack_what_they_should_have_are_refused(tmp_path, stage):
    folder = write(tmp_path, state_of(), stage, 2)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is no archive"):
        open_source(folder)
    path.write_bytes(whole)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    change(path, lambda content: content["optimizer_state_dict"].pop(key))
    with pytest.raises(Damaged, match=f"rank_1_.*has no '{key}'"):
        open_source(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_who_begins_from_it_is_told_that_it_has_no_random_numbers(tmp_path, stage):
    model = torch.nn.Linear(3, 2)
    state = random_state([{name: tuple(p.shape) for name, p in model.named_parameters()}])
    write(tmp_path / "there", state, stage, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = state.step + 2  # with those that were skipped
    for source in (tmp_path / "there", None):
        with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
            if source is not None:
                with pytest.warns(
                    UserWarning, match="it has no random numbers; the script's go on as they are"
                ):
                    assert checkpointer.resume(source=source) == steps
                assert checkpointer.exactness == "state"
            else:
                assert checkpointer.resume() == steps and checkpointer.exactness == "continuation"
