"""Synthetic distributed checkpoints of Megatron are read in place, whatever parallelism and form of optimizer wrote
them; a training goes on from them; what is damaged, hostile or of another save is refused with nothing touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile

import pytest
import torch
import transformers
from torch import nn

from formats.megatron_files import GROUPS, HEADS, SIZES, STEP, Chunk, Chunked, How, State, state, write
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, FileMissing, RunMismatch
from holdfast.formats.foreign_formats import format_of, open_source
from holdfast.formats.load import read_flat
from holdfast.formats.megatron.megatron_contents import named, shard_of, unstacked
from holdfast.sources import From
from holdfast.state.encoding import decode

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",
    "ignore:beginning from .* it has no random numbers",
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def tensors(source):
    found = {}
    for key, stored in source.atoms.items():
        values = read_flat(source, stored, 0, stored.atom.elements).view("u1")
        found[key] = torch.from_numpy(values).view(DTYPES[stored.atom.dtype]).reshape(stored.atom.shape)
    return found


def assert_same(found, expected):
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


EVERY = {
    "plain": How(),
    "stacked": How(stacked=True),
    "of NeMo": How(stacked=True, prefix="module."),
    "TP 2": How(tp=2),
    "halves": How(tp=2, stacked=True, halves=True),
    "TP 2, stacked": How(tp=2, stacked=True),
    "chained": How(chained="chained_0."),
    "model space": How(optimizer="fully_sharded_model_space"),
    "model space, TP 2, DP 3, stacked": How(tp=2, dp=3, stacked=True, optimizer="fully_sharded_model_space"),
    "model space, DP 2": How(dp=2, optimizer="fully_sharded_model_space"),
    "reshardable": How(tp=2, optimizer="fully_reshardable", stacked=True),
    "buckets": How(optimizer="fully_sharded_bucket_space"),
    "buckets, padded": How(optimizer="fully_sharded_bucket_space", bucket=700, dp=3, padded=True),
    "buckets, several": How(optimizer="fully_sharded_bucket_space", bucket=1000, dp=3),
    "buckets, TP 2, PP 2": How(optimizer="fully_sharded_bucket_space", bucket=700, tp=2, pp=2, dp=2),
    "buckets, TP 2, stacked": How(optimizer="fully_sharded_bucket_space", tp=2, stacked=True),
    "gathered, TP 2, PP 2": How(optimizer="dp_zero_gather_scatter", tp=2, pp=2, stacked=True),
    "gathered": How(optimizer="dp_zero_gather_scatter"),
}
"""Every second of them has all that sets the others apart."""


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize("how", EVERY.values(), ids=EVERY)
def test_every_tensor_is_read_whatever_wrote_it(tmp_path, how):
    of = state()
    write(tmp_path / "x", of, how)
    source = open_source(tmp_path / "x")
    assert source.format == "megatron"
    assert_same(tensors(source), of.expected)
    assert source.progress["step"] == STEP
    assert decode(source.progress["scheduler"]) == {"max_lr": 3e-4, "lr_warmup_steps": 2, "num_steps": 56}
    assert sorted(source.progress["group_parameters"][0]) == sorted(of.masters)
    for part in range(len(source.parts)):
        source.check(part)


@pytest.mark.parametrize(
    "kinds", [{"biases": True}, {"norm_biases": True}, {"biases": True, "norm_biases": True}]
)
def test_biases_have_their_places_in_buckets(tmp_path, kinds):
    of = state(**kinds)
    write(tmp_path / "x", of, How(optimizer="fully_sharded_bucket_space", tp=2, bucket=500))
    assert_same(tensors(open_source(tmp_path / "x")), of.expected)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["fully_sharded_bucket_space", "dp_zero_gather_scatter"])
def test_tied_embeddings_are_in_the_buffers_of_both_ends(tmp_path, kind, local):
    of = state(local=local)
    write(tmp_path / "x", of, How(optimizer=kind, tp=2, pp=2, tied=True, local=local))
    expected = {key: tensor for key, tensor in of.expected.items() if not key.startswith("output")}
    source = open_source(tmp_path / "x")
    assert_same(tensors(source), expected)
    assert len(source.atoms["embedding.word_embeddings.weight/exp_avg"].copies) == 1


def test_weights_alone_are_a_state(tmp_path):
    of = state()
    write(tmp_path / "x", of, How(optimizer=None, tp=2, stacked=True))
    source = open_source(tmp_path / "x")
    assert_same(tensors(source), {f"{name}/param": tensor for name, tensor in of.weights.items()})
    assert "groups" not in source.progress


def test_what_is_no_tensor_is_kept_by_value(tmp_path):
    write(tmp_path / "x", state(), How(pp=2))
    extra = open_source(tmp_path / "x").progress["extra"]
    assert extra["args"]["tensor_model_parallel_size"] == 1 and extra["args"]["params_dtype"] == "BF16"
    assert extra["args"]["attention_backend"]["__object__"] == "megatron.core.transformer.enums.AttnBackend"
    assert extra["content_metadata"] == {"distrib_optim_sharding_type": "plain"}
    assert set(extra) > {"rng_state/shard_0.0_2.1", "rng_state/shard_1.0_2.1"}
    assert torch.equal(
        decode(extra["rng_state/shard_0.0_2.1"])[0]["torch_rng_state"],
        torch.Generator().manual_seed(1).get_state(),
    )
    assert extra["optimizer"]["optimizer"]["param_groups"][1]["weight_decay"] == 0.0


def test_the_folder_above_names_the_newest(tmp_path):
    of = state()
    write(tmp_path / "iter_0000007", of, How())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert format_of(tmp_path) == "megatron"
    source = open_source(tmp_path)
    assert source.path == str(tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(FileMissing, match="names iter_0000008, which is no folder"):
        open_source(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../7")
    with pytest.raises(Damaged, match="which is no iteration"):
        open_source(tmp_path)


def test_experts_are_stacked_beside_layers_or_numbered():
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert list(unstacked(name, (2, 2, 8, 4)))[2] == (
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight", (1, 0)
    )  # fmt: skip
    single = "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight"
    assert list(unstacked(single, (8, 4))) == [
        ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", ())
    ]
    assert (
        named("optimizer.state.param.a.b").slot == named("optimizer.state.master_param.a.b").slot == "param"
    )
    assert shard_of("a/b") is None and shard_of("a/shard_0_1").shape == (1,)


class Named(nn.Module):
    """A model whose parameters have these names and shapes."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            *way, last = name.split(".")
            inner = self
            for part in way:
                if part not in inner._modules:
                    inner.add_module(part, nn.Module())
                inner = inner._modules[part]
            inner.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def begin(tmp_path, model, source, decay=0.3):
    """What a model and its optimizer hold when they began from ``source``, by key."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=decay)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        step = checkpointer.resume(source=source)
    names = {id(p): name for name, p in model.named_parameters()}
    held = {f"{name}/param": p.detach() for name, p in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        held |= {f"{names[id(parameter)]}/{slot}": tensor for slot, tensor in slots.items()}
    return step, held, optimizer.param_groups[0]


LIVE = ["TP 2, stacked", "model space, TP 2, DP 3, stacked", "buckets, TP 2, PP 2", "gathered"]


@pytest.mark.parametrize("how", [EVERY[name] for name in LIVE], ids=LIVE)
def test_a_training_goes_on_from_it(tmp_path, how):
    of = state()
    write(tmp_path / "x", of, how)
    model = Named({name: tensor.shape for name, tensor in of.masters.items()})
    step, held, group = begin(tmp_path, model, tmp_path / "x")
    assert step == STEP
    assert_same(held, of.expected)
    assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.9, 0.95), 1e-8)
    assert group["weight_decay"] == 0.3  # of which there are two, and whose is which is not stored


def of_llama(model):
    """Its tensors by Megatron's names, of each key-value head its queries, key and value: the oracle."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    pad = torch.full((3, 16), float("nan"))
    made = {"embedding.word_embeddings.weight": torch.cat([found["model.embed_tokens.weight"], pad])}
    for n in range(4):
        here, there = f"model.layers.{n}.", f"decoder.layers.{n}."
        q, k, v = (found[f"{here}self_attn.{head}_proj.weight"] for head in "qkv")
        heads = [
            q.view(GROUPS, HEADS // GROUPS, -1, 16),
            k.view(GROUPS, 1, -1, 16),
            v.view(GROUPS, 1, -1, 16),
        ]
        gate = torch.cat([found[f"{here}mlp.{half}_proj.weight"] for half in ("gate", "up")])
        made |= {
            f"{there}self_attention.linear_proj.weight": found[f"{here}self_attn.o_proj.weight"],
            f"{there}self_attention.linear_qkv.layer_norm_weight": found[f"{here}input_layernorm.weight"],
            f"{there}self_attention.linear_qkv.weight": torch.cat(heads, 1).reshape(-1, 16),
            f"{there}mlp.linear_fc1.layer_norm_weight": found[f"{here}post_attention_layernorm.weight"],
            f"{there}mlp.linear_fc1.weight": gate,
            f"{there}mlp.linear_fc2.weight": found[f"{here}mlp.down_proj.weight"],
        }
    made["decoder.final_layernorm.weight"] = found["model.norm.weight"]
    return made | {"output_layer.weight": torch.cat([found["lm_head.weight"], pad])}


def llama(seed):
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, **SIZES)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("optimizer", ["fully_sharded_model_space", "fully_sharded_bucket_space"])
@pytest.mark.slow
def test_a_hugging_face_model_goes_on_from_it_by_a_pack_of_rules(tmp_path, optimizer):
    slots = {slot: llama(seed) for seed, slot in enumerate(("param", "exp_avg", "exp_avg_sq"))}
    masters, *others = (of_llama(model) for model in slots.values())
    of = State(masters, dict(zip(("exp_avg", "exp_avg_sq"), others)))
    write(tmp_path / "x", of, How(tp=2, dp=2, stacked=True, optimizer=optimizer))
    step, held, group = begin(tmp_path, llama(9), From(tmp_path / "x", rules="megatron-to-llama"))
    expected = {
        f"{n}/{slot}": p.detach() for slot, model in slots.items() for n, p in model.named_parameters()
    }
    assert_same({k: t for k, t in held.items() if not k.endswith("/step")}, expected)
    assert step == STEP and all(held[f"{name}/step"] == STEP for name, _ in slots["param"].named_parameters())
    assert group["lr"] == 3e-4


def test_values_of_the_user_come_before_those_of_the_checkpoint(tmp_path):
    of = state()
    write(tmp_path / "x", of, How(optimizer=None))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 30}))
    start = From(tmp_path / "x", rules="megatron-to-llama", values=tmp_path / "config.json")
    assert start.source().atoms["lm_head.weight/param"].atom.shape == (30, 16)
    assert From(tmp_path / "x", rules="megatron-to-llama").source().atoms[
        "lm_head.weight/param"
    ].atom.shape == (37, 16)


def without_objects(content):
    content.entries = {key: entry for key, entry in content.entries.items() if isinstance(entry, Chunked)}


def test_a_file_of_tensors_alone_of_another_save_is_refused(tmp_path):
    for name, seed in (("x", 0), ("other", 5)):
        write(tmp_path / name, state(seed=seed), How(tp=2), without_objects)
    with_sums(tmp_path / "x")
    shutil.copy(tmp_path / "other" / "__0_0.distcp", tmp_path / "x")
    model = Named({name: tensor.shape for name, tensor in state().masters.items()})
    with pytest.raises(ChunkCorrupt, match=r"__0_0.distcp fails its SHA-256"):
        begin(tmp_path, model, tmp_path / "x")
    assert not any(p.any() for p in model.parameters())


class Loud:
    def __reduce__(self):
        return os.system, ("touch /tmp/holdfast-was-here",)


def torn(path, keep=0.6):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def flipped(path, within):
    """A bit in the bytes ``within`` the file."""
    data = bytearray(path.read_bytes())
    data[data.index(within) + len(within) // 2] ^= 4
    path.write_bytes(data)


def some_bytes():
    """Of the state of an optimizer."""
    return (
        state().slots["exp_avg"]["decoder.layers.1.self_attention.linear_qkv.weight"][3:9].numpy().tobytes()
    )


def hostile(path):
    torch.save({"iteration": 7, "args": Loud()}, path)


def nested(path):
    """Lists in lists, more than are read."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("common/data.pkl", b"\x80\x02}X\1\0\0\0x" + b"]" * 5000 + b"a" * 4999 + b"s.")


def swapped(folder):
    """Files of the same layout and another save."""
    write(folder.parent / "other", state(seed=5), How(tp=2))
    for path in (folder.parent / "other").glob("*.distcp"):
        shutil.copy(path, folder / path.name)


def with_sums(folder):
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))


def foreign(folder):
    with_sums(folder)
    swapped(folder)


def uncommon(folder):
    torch.save([1], folder / "common.pt")


def unlisted(folder):
    with_sums(folder)
    table = json.loads((folder / "integrity.json").read_text())
    del table["files"]["__0_0.distcp"]
    (folder / "integrity.json").write_text(json.dumps(table))


def named_outside(folder):
    (folder / "integrity.json").write_text(json.dumps({"files": {"../x": "0"}}))


def gone(folder):
    with_sums(folder)
    (folder / "common.pt").rename(folder / "elsewhere")


def config(folder, **more):
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"} | more))


FAULTS = {
    "file of tensors missing": (lambda f: (f / "__0_0.distcp").unlink(), FileMissing, "__0_0.distcp is missing"),
    "common missing": (lambda f: (f / "common.pt").unlink(), FileMissing, "common.pt is missing"),
    "metadata missing": (lambda f: (f / ".metadata").unlink(), FileMissing, ".metadata is missing"),
    "not finished": (lambda f: (f / "metadata.json").unlink(), FileMissing, "metadata.json is missing, which Mega"),
    "bit of a tensor": (lambda f: flipped(f / "__0_0.distcp", some_bytes()), Damaged, "__0_0.distcp"),
    "bit of common": (lambda f: flipped(f / "common.pt", b"num_layers"), Damaged, "common.pt"),
    "tensors cut short": (lambda f: torn(f / "__0_0.distcp"), Damaged, "__0_0.distcp, which has"),
    "common cut short": (lambda f: torn(f / "common.pt"), Damaged, "common.pt is no archive of torch.save"),
    "metadata cut short": (lambda f: torn(f / ".metadata"), Damaged, ".metadata holds no pickle"),
    "configuration cut short": (lambda f: torn(f / "metadata.json"), Damaged, "metadata.json does not read as JSON"),
    "hostile common": (lambda f: hostile(f / "common.pt"), Damaged, "common.pt names posix.system"),
    "nested common": (lambda f: nested(f / "common.pt"), Damaged, "no pickle that can be read: .* more than 100 deep"),
    "common is a list": (uncommon, Damaged, "common.pt holds a list and no dictionary"),
    "another save": (foreign, ChunkCorrupt, "__0_0.distcp fails its SHA-256"),
    "not in the sums": (unlisted, Damaged, "__0_0.distcp is not named by integrity.json"),
    "sums of elsewhere": (named_outside, Damaged, "which is not in the folder"),
    "named by the sums": (gone, Damaged, "common.pt is missing"),
    "another backend": (lambda f: config(f, sharded_backend="zarr"), BadInput, "is of the format 'zarr', version 1"),
    "another version": (lambda f: config(f, sharded_backend_version=2), BadInput, "version 2; torch_dist"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    of = state()
    folder = tmp_path_factory.mktemp("whole") / "x"
    write(folder, of, How(tp=2))
    return folder, of


@pytest.mark.parametrize(("fault", "error", "text"), FAULTS.values(), ids=FAULTS)
def test_every_fault_of_files_is_refused_by_name_with_nothing_touched(tmp_path, whole, fault, error, text):
    folder, of = whole
    shutil.copytree(folder, tmp_path / "x")
    fault(tmp_path / "x")
    model = Named({name: tensor.shape for name, tensor in of.masters.items()})
    with pytest.raises(error, match=text):
        begin(tmp_path, model, tmp_path / "x")
    assert not any(p.any() for p in model.parameters())
    assert not os.path.exists("/tmp/holdfast-was-here")


def first_chunk(content, fit):
    return next(entry for key, entry in content.entries.items() if fit in key)


def without_chunk(content):
    first_chunk(content, "exp_avg.").chunks.pop()


def without_rank(content):
    del content.entries["rng_state/shard_0.1_1.2"]


def beyond(content):
    content.entries["rng_state/shard_0.5_1.2"] = [1]


def hostile_object(content):
    content.entries["rng_state/shard_0.1_1.2"] = [Loud()]


def of_two_ages(content):
    content.common["optimizer"]["optimizer"]["param_groups"][0]["step"] = 9


def no_iteration(content):
    content.common["iteration"] = "seven"


def of_many_layers(content):
    content.entries["decoder.layers.w"] = Chunked((1 << 50, 0), [Chunk((0, 0), torch.zeros(1, 0))])


def under_two_keys(content):
    content.entries["module.decoder.final_layernorm.weight"] = content.entries[
        "decoder.final_layernorm.weight"
    ]


CONTENTS = {
    "part of a tensor missing": (without_chunk, "exp_avg .* elements stored, not"),
    "object of a rank missing": (without_rank, "of rng_state there are 1 of 2 parts"),
    "object of no rank": (beyond, r"the part \[0, 5\] of rng_state is none of \[1, 2\]"),
    "hostile object": (hostile_object, "rng_state/shard_0.1_1.2, .* names posix.system"),
    "two counts of steps": (of_two_ages, "parameter groups are 7.0 and 9.0 steps old"),
    "no iteration": (no_iteration, "says that the iteration is 'seven'"),
    "many empty layers": (of_many_layers, r"decoder.layers.w .* is no stack of layers"),
    "one name twice": (under_two_keys, "has decoder.final_layernorm.weight .of the model. twice"),
}


@pytest.mark.parametrize(("change", "text"), CONTENTS.values(), ids=CONTENTS)
def test_every_fault_of_content_is_refused_by_name_with_nothing_touched(tmp_path, monkeypatch, change, text):
    of = state()
    monkeypatch.setattr("torch.distributed.checkpoint.default_planner._validate_global_plan", lambda *_: [])
    write(tmp_path / "x", of, How(tp=2), change)
    model = Named({name: tensor.shape for name, tensor in of.masters.items()})
    with pytest.raises(Damaged, match=text):
        begin(tmp_path, model, tmp_path / "x")
    assert not any(p.any() for p in model.parameters())
    assert not os.path.exists("/tmp/holdfast-was-here")


@pytest.mark.parametrize("shape", [(2, 16, 300), (4, 16, 1), (2, 256), (0, 1, 256)])
def test_cells_that_are_no_grid_of_the_tensor_are_refused(tmp_path, whole, shape):
    def other(content):
        key = "optimizer.state.exp_avg.decoder.layers.0.self_attention.linear_proj.weight"
        entry = content.entries[key]
        entry.shape = shape
        entry.chunks = [Chunk((0,) * len(shape), torch.zeros(shape))]

    write(tmp_path / "x", state(), How(tp=2, optimizer="fully_sharded_model_space"), other)
    with pytest.raises(Damaged, match=r"exp_avg.*linear_proj.weight"):
        open_source(tmp_path / "x")


def other_order(content):
    """Two parameters of one size in each other's place in the buffers."""
    key = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
    )
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        chunks = content.entries[key + slot].chunks
        one, two = [
            n for n, chunk in enumerate(chunks) if len(chunk.data) == 16 and not chunk.data.isnan().any()
        ][:2]
        chunks[one], chunks[two] = (
            Chunk(chunks[one].start, chunks[two].data),
            Chunk(chunks[two].start, chunks[one].data),
        )


def test_buffers_in_another_order_are_refused_as_masters_have_to_be_the_parameters(tmp_path):
    write(tmp_path / "x", state(), How(optimizer="fully_sharded_bucket_space"), other_order)
    with pytest.raises(Damaged, match=r"layer.*norm.* is not its fp32 master, rounded"):
        open_source(tmp_path / "x")


@pytest.mark.parametrize("slot", ["param", "exp_avg"])
@pytest.mark.parametrize("by", [16, -16, 100_000])
def test_offsets_that_overrun_in_one_of_several_buckets_are_refused_by_name(tmp_path, monkeypatch, slot, by):
    """Over the next one's elements, over those before, and beyond the end. No filler takes their place."""
    monkeypatch.setattr("torch.distributed.checkpoint.default_planner._validate_global_plan", lambda *_: [])

    def overrun(content):
        [key] = [key for key in content.entries if key.endswith(f"bucket_idx_1.{slot}")]
        chunks = content.entries[key].chunks
        chunks[1] = Chunk((chunks[1].start[0] + by,), chunks[1].data)

    write(tmp_path / "x", state(), How(optimizer="fully_sharded_bucket_space", bucket=650), overrun)
    with pytest.raises(Damaged, match=rf"decoder.layers.3.mlp.*/{slot} .* elements stored, not"):
        open_source(tmp_path / "x")


def virtual(content):
    content.common["args"].virtual_pipeline_model_parallel_size = 2


def more_ranks(content):
    content.common["args"].tensor_model_parallel_size = 2


def another_module(content):
    content.entries["decoder.layers.0.extra.weight"] = content.entries["decoder.final_layernorm.weight"]


@pytest.mark.parametrize(
    ("change", "more", "text"),
    [
        (virtual, {}, "--virtual-pipeline-model-parallel-size"),
        (more_ranks, {}, r"ranks \[0\], and 2 x 1 ranks"),
        (another_module, {}, "decoder.layers.0.extra.weight is in its buffers is not known"),
        (lambda content: None, {"bucket": 650}, "it was in several buckets"),
        (
            lambda content: None,
            {"chained": "chained_1."},
            "param_state/shard_0_1.0.param: of several buffers",
        ),
    ],
)
def test_buffers_that_are_not_known_are_shown_and_not_taken(tmp_path, change, more, text):
    of = state()
    write(tmp_path / "x", of, How(optimizer="dp_zero_gather_scatter", **more), change)
    source = open_source(tmp_path / "x")
    assert text.replace("\\", "") in source.progress["extra"]["optimizer_is_not_known"]
    model = Named({name: tensor.shape for name, tensor in of.masters.items()})
    with pytest.raises(RunMismatch, match=r"nothing here wants its (chained_1\.)?optimizer\.distributed"):
        begin(tmp_path, model, From(tmp_path / "x", cast=True))
    if change is not another_module:
        with pytest.warns(UserWarning) as warned:
            _, held, _ = begin(tmp_path, model, From(tmp_path / "x", cast=True, partial=True))
        assert any("no optimizer state of" in str(each.message) for each in warned)
        assert_same(held, {f"{name}/param": tensor.float() for name, tensor in of.weights.items()})
