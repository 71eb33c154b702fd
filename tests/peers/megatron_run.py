"""One rank of a world of Megatron's core on gloo, without a GPU: steps and saves a GPT; tells what the rank holds.

A job says its parallelism, its form of optimizer and what the model
has. Gradients are made up, alike on ranks that hold the same: the forward is left out, and nothing else. What a rank
holds of each parameter, taken from its optimizer's own objects, goes to ``report`` with the number of the rank.
"""

from __future__ import annotations

import inspect
import multiprocessing
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from peers.without_cuda import go_without_cuda

SAVED, LAYERS = 3, 4
SIZES = {"num_layers": LAYERS, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4}
VOCABULARY = 40


def model_of(job):
    dtype = torch.float32 if job["optimizer"] == "fp32" else torch.bfloat16
    config = TransformerConfig(
        **SIZES, num_query_groups=2, num_moe_experts=job.get("experts"), use_cpu_initialization=True,
        gated_linear_unit=not job.get("biases"), add_bias_linear=job.get("biases", False),
        normalization="LayerNorm" if job.get("biases") else "RMSNorm", bf16=dtype is torch.bfloat16, params_dtype=dtype,
        pipeline_dtype=dtype, gradient_accumulation_fusion=False, tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"], expert_model_parallel_size=job.get("ep", 1), moe_grouped_gemm=False,
        sequence_parallel=bool(job.get("experts")) and job["tp"] > 1, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    norm = {"normalization": config.normalization}
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    spec = get_gpt_layer_local_spec(
        num_experts=job.get("experts"), **{name: value for name, value in norm.items() if name in known}
    )
    torch.manual_seed(7)
    model = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=8, position_embedding_type="rope",
        share_embeddings_and_output_weights=job.get("tied", False), pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
    )  # fmt: skip
    return config, model.to(dtype)


def optimizer_of(job, config, model):
    distributed = job["optimizer"] not in ("plain", "fp32")
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=bool(job.get("bucket")),
            bucket_size=job.get("bucket"),
        ),
        model,
    )  # fmt: skip
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.1, bf16=config.bf16, params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed, clip_grad=0.0,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [wrapped])
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=9, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=9, wd_incr_style="constant",
    )  # fmt: skip
    return wrapped, optimizer, schedule


def global_names(job, model):
    """Of the parameters here, by those of the whole model as checkpoints have them."""
    names = {}
    offset = {id(layer): layer.layer_number - 1 for layer in model.decoder.layers}
    each = (job.get("experts") or 0) // job.get("ep", 1)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(offset[id(model.decoder.layers[int(parts[at])])])
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + each * ps.get_expert_model_parallel_rank())
        name = ".".join(parts)
        for theirs, stored in (
            (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
            (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
        ):
            name = name.replace(theirs, stored)
        names[parameter] = name
    return names


def train(names, optimizer, schedule):
    """Steps with made up gradients: one generator by parameter, and by the part of it that is here."""
    for step in range(SAVED):
        for parameter, name in names.items():
            part = (
                ps.get_tensor_model_parallel_rank()
                if getattr(parameter, "tensor_model_parallel", False)
                else 0
            )
            if name == "output_layer.weight" and optimizer.tied:
                name = "embedding.word_embeddings.weight"
            seed = hash_of(f"{name} {part} {step}")
            grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.main_grad.copy_(grad)
        done, *_ = optimizer.step()
        assert done
        schedule.step(increment=8)


def hash_of(text):
    return int.from_bytes(text.encode(), "little") % (2**61 - 1)


def held_by(optimizer):
    """Of each parameter here: from which element of it on, and what the optimizer has for that stretch."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(one, DistributedOptimizer):
            for ranges in one.gbuf_ranges:
                for buckets in ranges.values():
                    for bucket in buckets:
                        for parameter, at in bucket["param_map"].items():
                            yield (
                                parameter,
                                at["param"].start,
                                one._get_main_param_and_optimizer_states(parameter),
                            )
        elif hasattr(one, "float16_groups"):
            for parameters, masters in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                for parameter, master in zip(parameters, masters, strict=True):
                    yield parameter, 0, {"param": master, **one.optimizer.state[master]}
            assert not any(one.fp32_from_fp32_groups)
        else:
            for parameter, slots in one.optimizer.state.items():
                yield parameter, 0, {"param": parameter, **slots}


def told(names, optimizer):
    rows = []
    for parameter, start, slots in held_by(optimizer):
        sharded = getattr(parameter, "tensor_model_parallel", False)
        rows.append({
            "name": names[parameter], "start": start, "shape": tuple(parameter.shape),
            "dim": parameter.partition_dim if sharded else None, "tp": ps.get_tensor_model_parallel_rank(),
            "slots": {slot: t.detach().clone().flatten() for slot, t in slots.items() if slot != "step"},
        })  # fmt: skip
    return rows


def arguments_of(job):
    return Namespace(
        **SIZES, tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
        untie_embeddings_and_output_weights=not job.get("tied", False), transformer_impl="local",
        num_experts=job.get("experts"), group_query_attention=True, num_query_groups=2, padded_vocab_size=VOCABULARY,
        attention_backend=AttnBackend.auto, params_dtype=torch.bfloat16,
    )  # fmt: skip


def save(job, model, optimizer, schedule):
    kind = job["optimizer"]
    metadata = {
        "distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": job.get("singleton", False), "non_homogeneous_layers": not job.get("stacked", False),
    }  # fmt: skip
    if kind in ("plain", "fp32"):
        del metadata["distrib_optim_sharding_type"]
    state = {"args": arguments_of(job), "checkpoint_version": 3.0, "iteration": SAVED}
    state["model"] = model.sharded_state_dict(metadata=metadata)
    known = inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    options = {"metadata": metadata} if "metadata" in known else {"sharding_type": kind}
    if kind in ("plain", "fp32") and "metadata" not in known:
        options = {}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], **options)
    state["opt_param_scheduler"] = schedule.state_dict()
    place = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
    state["rng_state"] = dist_checkpointing.mapping.ShardedObject(
        "rng_state", [{"torch_rng_state": torch.get_rng_state()}], (job["pp"], job["tp"]), place,
        replica_id=ps.get_data_parallel_rank(with_context_parallel=True),
    )  # fmt: skip
    if torch.distributed.get_rank() == 0:
        Path(job["folder"]).mkdir(parents=True)
    torch.distributed.barrier()
    content = {"content_metadata": {k: v for k, v in metadata.items() if k != "dp_cp_group"}}
    known = inspect.signature(dist_checkpointing.save).parameters
    dist_checkpointing.save(state, job["folder"], **(content if "content_metadata" in known else {}))


def amend_old():
    """Before 0.14 the steps of torch's Adam are taken for a state of each element (that of a GPU has none), and NumPy
    is the first one."""
    states = DistributedOptimizer._get_main_param_and_optimizer_states
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 14):
        np.product = np.prod
        DistributedOptimizer._get_main_param_and_optimizer_states = lambda self, parameter: {
            slot: tensor for slot, tensor in states(self, parameter).items() if slot != "step"
        }


def main(rank, world_size, rendezvous, say, *, jobs):
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()  # it would start an interpreter that imports torch
        do(jobs, rank, world_size, rendezvous)


def do(jobs, rank, world_size, rendezvous):
    go_without_cuda()
    amend_old()
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    for job in jobs:
        ps.initialize_model_parallel(job["tp"], job["pp"], expert_model_parallel_size=job.get("ep", 1))
        model_parallel_cuda_manual_seed(1)
        config, model = model_of(job)
        wrapped, optimizer, schedule = optimizer_of(job, config, model)
        optimizer.tied = job.get("tied", False)
        names = global_names(job, model)
        train(names, optimizer, schedule)
        save(job, model, optimizer, schedule)
        weights = {name: p.detach().clone() for p, name in names.items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        torch.save(
            {
                "held": told(names, optimizer),
                "weights": weights,
                "groups": groups,
                "schedule": schedule.state_dict(),
            },
            f"{job['report']}.{rank}",
        )
        del wrapped
        ps.destroy_model_parallel()
    torch.distributed.barrier()
