"""Checkpoints of tensor and pipeline parallelism, as Megatron-DeepSpeed and AutoTP say in them how they are cut.

No real one can be made without a GPU: the files are made field by field, by plain slicing of whole tensors.
"""

from __future__ import annotations

import pytest
import torch

from formats.deepspeed_files import State, load, save, write
from formats.test_deepspeed import bits
from holdfast.errors import BadInput, Damaged, FileMissing
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import unequal_copies

TENSOR, VOCABULARY = 2, 37
EMBED, NORM, BIAS = (
    "tied_modules.embed.word_embeddings.weight",
    "2.input_layernorm.weight",
    "2.attention.dense.bias",
)
QKV, GATED, DOWN = (
    "2.attention.query_key_value.weight",
    "2.mlp.dense_h_to_4h.weight",
    "2.mlp.dense_4h_to_h.weight",
)
GROUPED, COLUMN, DRIFTED = "3.attention.query_key_value.weight", "3.mlp.dense.weight", "3.norm.bias"
WIDTHS = [[8, 8], [4, 0], [3, 1]]  # of queries, keys and values in each rank
INFO = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": VOCABULARY,
    "tp_replicated_parameter_patterns": [r"\d+\.input_layernorm.*", r"\d+\.attention\.dense\.bias"],
    "parameter_to_average_patterns": [r"3\.norm\.bias"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.mlp\.dense_4h_to_h\.weight"],
    "vocabulary_parameter_patterns": [r".*word_embeddings\.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed.*"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.mlp\.dense_h_to_4h\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r"3\.attention\.query.*"], "shape": ((16, 4, 4), 6), "partition_dim": 0}
    ],
    "sub_param_shard_widths": {r"3\.attention\.query.*": WIDTHS},
}
OTHER = [[8, 8], [4, 0], [4, 1]]
STAGES = [
    {EMBED: (VOCABULARY, 6), QKV: (18, 6), GATED: (20, 6), DOWN: (6, 10), NORM: (6,), BIAS: (6,)},
    {EMBED: (VOCABULARY, 6), GROUPED: (24, 6), COLUMN: (14, 6), DRIFTED: (5,)},
]


def cut(name, tensor, rank):
    """What a tensor-parallel rank has of ``tensor``."""
    if name == EMBED:
        padded = torch.cat([tensor, torch.full((3, 6), float("nan"))])
        return padded[rank * 20 : (rank + 1) * 20]
    if name in (NORM, BIAS):
        return tensor
    if name == DRIFTED:
        return tensor + (0.25 if rank else -0.25)
    if name == DOWN:
        return tensor[:, rank * 5 : (rank + 1) * 5]
    if name == GATED:
        return torch.cat([half[rank * 5 : (rank + 1) * 5] for half in (tensor[:10], tensor[10:])])
    if name == GROUPED:
        parts = zip(tensor.split([16, 4, 4]), WIDTHS, strict=True)
        return torch.cat([part[sum(w[:rank]) : sum(w[: rank + 1])] for part, w in parts])
    rows = len(tensor) // TENSOR
    return tensor[rank * rows : (rank + 1) * rows]


def whole_state():
    generator = torch.Generator().manual_seed(5)
    shapes = {name: shape for stage in STAGES for name, shape in stage.items()}
    made = {
        slot: {
            n: torch.randint(-64, 64, shape, generator=generator).float() / 8 for n, shape in shapes.items()
        }
        for slot in ("param", "exp_avg", "exp_avg_sq")
    }
    return State([made.pop("param")], made)


def write_3d(root, state, zero=1, info=INFO, world=2, stages=STAGES):
    """Every model-parallel rank is a checkpoint of what it has; they lie in one folder."""
    degrees = {"pp_degree": len(stages), "tp_degree": TENSOR}
    beside = {
        "universal_checkpoint_info": info,
        "mp_world_size": TENSOR * len(stages),
        "checkpoint_parallel_dimensions": degrees,
    }
    for pp, names in enumerate(stages):
        for tp in range(TENSOR):
            own = {n: cut(n, state.groups[0][n], tp) for n in names}
            slots = {slot: {n: cut(n, named[n], tp) for n in names} for slot, named in state.slots.items()}
            mp = pp * TENSOR + tp
            mine = {**beside, **({"module": {}} if len(stages) > 1 else {})}  # layers have files of their own
            folder = write(root, State([own], slots, buffers=state.buffers), zero, world, mp=mp, beside=mine)
    return folder


def expected(state, names):
    return {
        key: (tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in state.expected.items()
        if key.rpartition("/")[0] in names
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_pattern_of_a_3d_checkpoint_gives_the_whole_tensor(tmp_path, world):
    state = whole_state()
    write_3d(tmp_path, state, world=world)
    source = open_source(tmp_path)
    assert bits(source) == expected(state, {*STAGES[0], *STAGES[1]})
    assert not list(unequal_copies(source, source.atoms.values()))
    assert source.progress["group_parameters"] == [[*STAGES[0], *(n for n in STAGES[1] if n != EMBED)]]


@pytest.mark.parametrize("zero", [1, 3])
def test_tensor_parallelism_alone_is_read_of_any_stage(tmp_path, zero):
    state = whole_state()
    names = {n: shape for stage in STAGES for n, shape in stage.items()}
    write_3d(tmp_path, state, zero, world=3, stages=[names])
    assert bits(open_source(tmp_path)) == expected(state, names)


@pytest.mark.parametrize("name", [NORM, EMBED])
def test_copies_that_differ_are_told(tmp_path, name):
    """The same parameter of two tensor-parallel ranks, or of two pipeline stages."""
    state, other = whole_state(), whole_state()
    folder = write_3d(tmp_path / "a", state)
    other.groups[0][name][2] += 1
    changed = write_3d(tmp_path / "b", other)
    mp = 1 if name == NORM else 2
    for rank in range(2):
        path = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        (changed / path).rename(folder / path)
    source = open_source(folder)
    [damage] = unequal_copies(source, source.atoms.values())
    assert f"{name}/param" in str(damage)


def test_buffers_are_those_of_the_first_tensor_parallel_rank(tmp_path):
    state = whole_state()
    state.buffers = {"rotary.inv_freq": torch.arange(32.0), "count": torch.tensor(3)}
    names = {n: shape for stage in STAGES for n, shape in stage.items()}
    write_3d(tmp_path, state, stages=[names])
    assert bits(open_source(tmp_path)) == expected(state, {*names, *state.buffers})


def test_a_parameter_that_a_later_rank_alone_has_is_told(tmp_path):
    names = {n: shape for stage in STAGES for n, shape in stage.items()}
    folder = write_3d(tmp_path, whole_state(), stages=[names])
    path = folder / "mp_rank_01_model_states.pt"
    content = load(path)
    content["module"]["more"] = torch.zeros(2)
    save(content, path)
    with pytest.raises(Damaged, match="mp_rank_00 has no more, others have"):
        open_source(folder)


def test_a_rank_that_is_missing_is_named(tmp_path):
    folder = write_3d(tmp_path, whole_state())
    (folder / "zero_pp_rank_1_mp_rank_02_optim_states.pt").unlink()
    with pytest.raises(FileMissing, match=r"data-parallel rank 1 \(of 2\) and mp_rank_02 \(of 4\)"):
        open_source(folder)
    for path in folder.glob("*mp_rank_03*"):
        path.unlink()
    with pytest.raises(FileMissing):
        open_source(folder)


def without(key):
    return {name: value for name, value in INFO.items() if name != key}


@pytest.mark.parametrize(
    ("info", "error", "said"),
    [
        (None, BadInput, "has no universal_checkpoint_info"),
        ({**INFO, "parameter_to_average_patterns": ["3.norm.bias", "nothing"]}, BadInput, "'nothing' .*no parameter"),
        ({**INFO, "parameter_to_average_patterns": ["3.norm.bias", "3.norm"]}, BadInput, "matched by 2 patterns"),
        ({**INFO, "parameter_to_average_patterns": ["3.norm.bias", "2.input"]}, BadInput, "says not what it is"),
        (without("sub_param_shard_widths"), BadInput, "their widths by rank are not recorded"),
        ({**INFO, "sub_param_shard_widths": {r"3\.attention\.query.*": OTHER}}, Damaged, "in parts of"),
        ({**INFO, "tp_replicated_parameter_patterns": [r"2\.att", r"3\.attention"]}, BadInput, "several of"),
        (without("pipeline_replicated_parameter_patterns"), Damaged, "two pipeline stages have a parameter tied"),
        ({**INFO, "original_vocab_size": 41}, Damaged, "41 rows are meant"),
        ({**INFO, "autotp_unsupported_parameter_patterns": {"x": "y"}}, BadInput, "autotp_unsupported"),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit_are_refused(tmp_path, info, error, said):
    write_3d(tmp_path, whole_state(), info=info)
    with pytest.raises(error, match=said):
        open_source(tmp_path)


def test_degrees_that_do_not_fit_the_files_are_refused(tmp_path):
    folder = write_3d(tmp_path, whole_state())
    for path in folder.glob("*model_states.pt"):
        content = load(path)
        content["checkpoint_parallel_dimensions"]["pp_degree"] = 3
        save(content, path)
    with pytest.raises(Damaged, match="2 x 3 tensor- and pipeline-parallel ranks saved, and there are 4"):
        open_source(folder)
