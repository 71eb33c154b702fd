"""SYNTHETIC checkpoints of Megatron's format ``torch_dist``: its keys, fields, class names and arithmetic in plain
lines, on the writer of ``torch.distributed.checkpoint``, without Megatron. ``tests/peers`` has those of its core.

Paddings are NaN, so that none can come to anywhere unseen.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import sys
import types
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

NAN = float("nan")
LAYERS, WIDTH, INNER, HEADS, GROUPS, VOCABULARY, PADDED = 4, 16, 24, 4, 2, 37, 40
SIZES = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY,
}  # fmt: skip
STEP = 7
METADATA_CLASS = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
BACKEND_CLASS = ("megatron.core.transformer.enums", "AttnBackend")


def shapes(biases=False, norm_biases=False, local=False):
    """The parameters of a small GPT in the order of its modules: those of Transformer Engine, or Megatron's own."""
    head = WIDTH // HEADS
    found = {"embedding.word_embeddings.weight": (PADDED, WIDTH)}
    for n in range(LAYERS):
        inner = {
            "self_attention.linear_proj": (WIDTH, WIDTH),
            "self_attention.linear_qkv.layer_norm_": (WIDTH,),
            "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * head, WIDTH),
            "mlp.linear_fc1.layer_norm_": (WIDTH,),
            "mlp.linear_fc1": (2 * INNER, WIDTH),
            "mlp.linear_fc2": (WIDTH, INNER),
        }
        if local:
            norm = "self_attention.linear_qkv.layer_norm_"
            inner = {norm: inner[norm], **inner}
        for name, shape in inner.items():
            norm = name.endswith("_")
            found[f"decoder.layers.{n}.{name}{'' if norm else '.'}weight"] = shape
            if norm_biases if norm else biases:
                found[f"decoder.layers.{n}.{name}{'' if norm else '.'}bias"] = shape[:1]
    found["decoder.final_layernorm.weight"] = (WIDTH,)
    found["output_layer.weight"] = (PADDED, WIDTH)
    return found


@dataclass
class State:
    """What a checkpoint is of: the fp32 master of each parameter, and by slot tensors of their shapes."""

    masters: dict[str, torch.Tensor]
    slots: dict[str, dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.bfloat16

    @property
    def weights(self):
        return {name: master.to(self.dtype) for name, master in self.masters.items()}

    @property
    def all_slots(self):
        return {"param": self.masters, **self.slots}

    @property
    def expected(self):
        """Every tensor by key, as it has to be read."""
        found = {f"{name}/{slot}": t for slot, of in self.all_slots.items() for name, t in of.items()}
        return found | {f"{name}/step": torch.tensor(float(STEP)) for name in self.masters}


def state(dtype=torch.bfloat16, seed=0, **kinds):
    chance = torch.Generator().manual_seed(seed)
    of = shapes(**kinds)
    made = [{name: torch.randn(shape, generator=chance) for name, shape in of.items()} for _ in range(3)]
    return State(
        made[0], {"exp_avg": made[1], "exp_avg_sq": {n: t.square() for n, t in made[2].items()}}, dtype
    )


@dataclass(frozen=True)
class Chunk:
    start: tuple[int, ...]
    data: torch.Tensor


@dataclass
class Chunked:
    """A tensor that ``dcp.save`` writes in chunks, as several ranks would."""

    shape: tuple[int, ...]
    chunks: list[Chunk]

    def __create_write_items__(self, key, _):
        return [
            WriteItem(
                MetadataIndex(key, torch.Size(chunk.start), number), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.start), chunk.data.shape),
                    TensorProperties.create_from_tensor(chunk.data), torch.Size(self.shape),
                ),
            )
            for number, chunk in enumerate(self.chunks)
        ]  # fmt: skip

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(chunk.start), chunk.data.shape) for chunk in self.chunks]

    def __get_tensor_shard__(self, index):
        return next(chunk.data for chunk in self.chunks if chunk.start == tuple(index.offset))


@dataclass(frozen=True)
class How:
    """The ranks that save, and what they write."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stacked: bool = False
    prefix: str = ""
    chained: str = ""
    optimizer: str | None = "plain"
    bucket: int | None = None
    padded: bool = False
    halves: bool = False
    tied: bool = False
    local: bool = False


@dataclass
class Content:
    """Of a checkpoint: ``entries`` by key, those of them that are flattened in cells with their shapes, ``common``."""

    entries: dict[str, object] = field(default_factory=dict)
    originals: dict[str, tuple[int, ...]] = field(default_factory=dict)
    common: dict[str, object] = field(default_factory=dict)


def fragments(name, tp):
    """In how many parts each axis is cut: gate and up are two to begin with."""
    if "layer_norm" in name or "layernorm" in name or name.endswith(("linear_proj.bias", "fc2.bias")):
        return 1, 1
    if "linear_proj" in name or "linear_fc2" in name:
        return 1, tp
    return (2 * tp if "linear_fc1" in name else tp), 1


def cells(name, tensor, tp):
    """The parts of a parameter, by where they are in the grid."""
    grid = fragments(name, tp)[: tensor.dim()]
    local = tuple(n // f for n, f in zip(tensor.shape, grid))
    places = [
        (i, *j) for i in range(grid[0]) for j in ([(k,) for k in range(grid[1])] if len(grid) > 1 else [()])
    ]
    for place in places:
        part = tensor
        for axis, (at, n) in enumerate(zip(place, local)):
            part = part.narrow(axis, at * n, n)
        yield grid, local, place, part.contiguous()


def key_of(name, how):
    """The key of a parameter, and where it is in the stack of its layers."""
    parts = name.split(".")
    if how.stacked and "layers" in parts:
        number = parts.index("layers") + 1
        return ".".join([how.prefix + parts[0], *parts[1:number], *parts[number + 1 :]]), (
            int(parts[number]),
        )
    return how.prefix + name, ()


def put(content, start, name, tensor, how):
    """A tensor as the chunks that tensor parallel ranks have."""
    key, place = key_of(name, how)
    pairs = [(key, tensor)]
    if how.halves and "linear_fc1.weight" in name:
        pairs = list(zip((f"{key}_w", f"{key}_v"), tensor.chunk(2)))
    for key, part in pairs:
        shape = ((LAYERS,) if place else ()) + tuple(part.shape)
        entry = content.entries.setdefault(start + key, Chunked(shape, []))
        named = name.replace("linear_fc1", "linear_half") if how.halves else name
        for _, local, at, data in cells(named, part, how.tp):
            corner = tuple(a * n for a, n in zip(at, local))
            entry.chunks.append(Chunk((*place, *corner), data.view((1,) * len(place) + data.shape)))


def put_flattened(content, start, name, tensor, how):
    """As ``fully_sharded_model_space`` has it: of each tensor parallel part a stretch by each data parallel rank."""
    key, place = key_of(name, how)
    key = start + key
    stack = (LAYERS,) if place else ()
    for grid, local, at, data in cells(name, tensor, how.tp):
        entry = content.entries.setdefault(key, Chunked((*stack, *grid, math.prod(local)), []))
        content.originals[key] = stack + tuple(tensor.shape)
        flat = data.reshape(-1)
        cuts = sorted(
            {0, *(len(flat) * r // how.dp + (1 if 0 < r < how.dp else 0) for r in range(how.dp + 1))}
        )
        cuts = [min(cut, len(flat)) for cut in cuts]
        for a, b in pairwise(cuts):
            if b > a:
                stretch = flat[a:b].clone().view((1,) * (len(place) + len(at)) + (-1,))
                entry.chunks.append(Chunk((*place, *at, a), stretch))


def locals_of(tensors, how, tp, stage):
    """What a model parallel rank has, in the order of its modules."""
    found = {}
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        first = name.startswith("embedding")
        here = (
            layer * how.pp // LAYERS == stage
            if layer is not None
            else stage == 0
            if first
            else stage == how.pp - 1
        )
        if not here or (how.tied and name.startswith("output")):
            continue
        parts = [data for *_, data in cells(name, tensor, how.tp)]
        if "linear_fc1.weight" in name or "linear_fc1.bias" in name:
            parts = [torch.cat([parts[i], parts[how.tp + i]]) for i in range(how.tp)]
        found[name] = parts[tp if len(parts) > 1 else 0]
    if how.tied and stage and stage == how.pp - 1:
        word = tensors["embedding.word_embeddings.weight"]
        found["output"] = [data for *_, data in cells("embedding", word, how.tp)][tp]
    return found


def buckets_of(held, how):
    """The buckets that Megatron makes of these, without the padding at their ends; where parameters are in each."""
    done, current, places = [], [], []

    def close():
        done.append((torch.cat(current), list(places)))
        current.clear()
        places.clear()

    for name in reversed(held):
        end = sum(map(len, current))
        pad = -end % 64
        alone = how.tied and how.pp > 1 and name in ("output", "embedding.word_embeddings.weight")
        if pad:
            current.append(torch.full((pad,), NAN))
        if alone and end:
            close()
        start = sum(map(len, current))
        current.append(held[name].reshape(-1).float())
        places.append((start, start + held[name].numel()))
        if alone or (how.bucket is not None and start + held[name].numel() >= how.bucket):
            close()
    if current:
        close()
    return done


def put_buckets(content, state, how):
    """As ``fully_sharded_bucket_space`` has it: stretches of parameters and paddings, by each data parallel rank."""
    for stage in range(how.pp):
        for tp in range(how.tp):
            group = f"{how.chained}optimizer.distributed.dp_group_idx_{stage * how.tp + tp}"
            sizes = []
            for slot, tensors in state.all_slots.items():
                for number, (flat, places) in enumerate(buckets_of(locals_of(tensors, how, tp, stage), how)):
                    key = (
                        f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}.{slot}"
                    )
                    step = -(-len(flat) // math.lcm(how.dp, 128)) * math.lcm(how.dp, 128) // how.dp
                    ends = {
                        0,
                        len(flat),
                        *range(0, len(flat), step),
                        *(at for place in places for at in place),
                    }
                    cuts = sorted(ends)
                    if how.padded:
                        put_padded(content, key, flat, cuts, step, how)
                        sizes.append(len(flat))
                        continue
                    content.entries[key] = Chunked(
                        (len(flat),), [Chunk((a,), flat[a:b].clone()) for a, b in pairwise(cuts)]
                    )
                    sizes.append(len(flat))
            content.entries[f"{group}.per_bucket_numel_unpadded/shard_0_1"] = [
                [{(torch.bfloat16, torch.float32): sizes[: len(sizes) // 3]}]
            ]
            content.entries[f"{group}.optimizer/shard_0_1"] = [{"param_groups": groups()}]


def put_padded(content, key, flat, cuts, step, how):
    """As before 0.14: with the padding at the end, each rank's part a cell that is cut."""
    flat = torch.cat([flat, torch.full((how.dp * step - len(flat),), NAN)])
    cuts = sorted({*cuts, len(flat), *range(0, len(flat), step)})
    content.originals[key] = (len(flat),)
    content.entries[key] = Chunked(
        (how.dp, step), [Chunk((a // step, a % step), flat[None, a:b].clone()) for a, b in pairwise(cuts)]
    )


def put_gathered(content, state, how):
    """As ``dp_zero_gather_scatter`` has it: what the first data parallel rank gathered, without paddings of buckets."""
    for stage in range(how.pp):
        for tp in range(how.tp):
            group = f"{how.chained}optimizer.distributed.dp_group_idx_{stage * how.tp + tp}"
            held = {
                slot: torch.cat([flat for flat, _ in buckets_of(locals_of(tensors, how, tp, stage), how)])
                for slot, tensors in state.all_slots.items()
            }
            by_dtype = {**held, "numel_unpadded": len(held["param"])}
            content.entries[f"{group}.param_state/shard_0_1"] = [
                {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): by_dtype}}
            ]
            content.entries[f"{group}.optimizer/shard_0_1"] = [{"param_groups": groups()}]


def groups(step=STEP):
    same = {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "step": step,
    }
    return [{**same, "wd_mult": 1.0, "weight_decay": 0.1}, {**same, "wd_mult": 0.0, "weight_decay": 0.0}]


def content_of(state, how):
    """Of the checkpoint that ranks ``how`` would write of ``state``."""
    content = Content()
    for name, tensor in state.weights.items():
        if not (how.tied and name == "output_layer.weight"):
            put(content, "", name, tensor, how)
    called = {"plain": "fp32_param", "fully_sharded_model_space": "fp32_param", "fully_reshardable": "param"}
    if how.optimizer in called:
        one = put_flattened if how.optimizer == "fully_sharded_model_space" else put
        for slot, tensors in state.all_slots.items():
            slot = called[how.optimizer] if slot == "param" else slot
            for name, tensor in tensors.items():
                if not (how.tied and name == "output_layer.weight"):
                    one(content, f"{how.chained}optimizer.state.{slot}.", name, tensor, how)
    elif how.optimizer == "fully_sharded_bucket_space":
        put_buckets(content, state, how)
    elif how.optimizer == "dp_zero_gather_scatter":
        put_gathered(content, state, how)
    for n in range(LAYERS):
        key = "decoder.layers.self_attention.linear_qkv._extra_state"
        content.entries[f"{how.prefix}{key}/shard_{n}_{LAYERS}"] = [io.BytesIO(b"")]
    for stage in range(how.pp):
        for tp in range(how.tp):
            content.entries[f"rng_state/shard_{stage}.{tp}_{how.pp}.{how.tp}"] = [[rng()]]
    content.common = common_of(how)
    return content


def rng():
    return {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(1).get_state(),
        "rng_tracker_states": {},
    }


def common_of(how):
    inner = {"param_groups": groups()}
    if how.optimizer == "plain":
        inner = {"state": {"common_step": torch.tensor(float(STEP))}, "param_groups": groups(None)}
    optimizer = {"optimizer": inner, "param_state_sharding_type": how.optimizer}
    if how.optimizer in ("fully_sharded_bucket_space", "dp_zero_gather_scatter"):
        del optimizer["optimizer"]
    arguments = Namespace(
        num_layers=LAYERS, num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True,
        padded_vocab_size=PADDED, vocab_size=VOCABULARY, tensor_model_parallel_size=how.tp,
        pipeline_model_parallel_size=how.pp, virtual_pipeline_model_parallel_size=None, num_experts=None,
        untie_embeddings_and_output_weights=not how.tied,
        transformer_impl="local" if how.local else "transformer_engine",
        params_dtype=torch.bfloat16, attention_backend=stub(*BACKEND_CLASS)(5),
    )  # fmt: skip
    return {
        "args": arguments, "checkpoint_version": 3.0, "iteration": STEP,
        **({"optimizer": optimizer} if how.optimizer else {}),
        "opt_param_scheduler": {"max_lr": 3e-4, "lr_warmup_steps": 2, "num_steps": STEP * 8},
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"distrib_optim_sharding_type": how.optimizer},
    }  # fmt: skip


def stub(module, name, **body):
    body = {"__init__": lambda self, *args: setattr(self, "args", args)} | body
    body |= {"__reduce__": lambda self: (type(self), self.args)} if name == BACKEND_CLASS[1] else {}
    return KINDS.setdefault(
        (module, name), type(name, (), {"__module__": module, "__qualname__": name, **body})
    )


KINDS: dict[tuple[str, str], type] = {}


@contextmanager
def installed():
    """The classes of Megatron can be found by name, as they are where it is installed."""
    stubs = {}
    for (module, name), kind in KINDS.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            stubs.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        setattr(stubs[module], name, kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        yield


class Planner(DefaultSavePlanner):
    """Objects have been saved."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index):
        entry = self.state_dict[index.fqn]
        return entry.__get_tensor_shard__(index) if isinstance(entry, Chunked) else entry

    def transform_object(self, write_item, object):
        return object


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def write(folder, state, how, change=None):
    """The checkpoint ``how`` of ``state``, with ``change`` made to what is in it. Returns its content."""
    content = content_of(state, how)
    if change is not None:
        change(content)
    entries = {k: v if isinstance(v, Chunked) else saved(v) for k, v in content.entries.items()}
    dcp.save(entries, checkpoint_id=folder, planner=Planner(), no_dist=True)
    stub(*METADATA_CLASS)
    with installed():
        torch.save(content.common, folder / "common.pt")
        with open(folder / ".metadata", "rb") as file:
            table = pickle.load(file)
        theirs = object.__new__(KINDS[METADATA_CLASS])
        more = {k: {"nd_reformulated_orig_global_shape": shape} for k, shape in content.originals.items()}
        theirs.__dict__.update(table.__dict__, mcore_data=more)
        (folder / ".metadata").write_bytes(pickle.dumps(theirs))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    return content
