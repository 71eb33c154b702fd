"""Runs of a tiny mixture of experts whose experts are frozen, in a plain loop and out of core."""

from __future__ import annotations

import torch
import transformers

import holdfast
from training import state_of

EXPERTS, BLOCKS, VOCABULARY = 16, 3, 200
EXPERT_BYTES = 4 * (64 * 32 + 32 * 32)
"""Of one expert in fp32: three whole pages."""


def mixture(dtype=torch.float32, **options):
    """A Qwen 3 MoE in ``dtype`` with values of bf16, which computes its experts one after another."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
        max_position_embeddings=16, use_cache=False, **{"num_hidden_layers": BLOCKS, **options},
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16().to(dtype).train()
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


def adamw(model, **options):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def micro_batches(step, count=2, length=4):
    tokens = torch.randint(0, VOCABULARY, (count, 1, length), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "labels": each} for each in tokens]


def plain_loop(steps):
    """The losses and the state of a plain loop, and the experts that each step's micro-batches used, by block."""
    model, losses = mixture(), []
    optimizer, used = adamw(model, fused=True), []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args: used[-1].append(sorted({*args[1].flatten().tolist()}))
        )
    for step in range(steps):
        total, experts = 0.0, []
        for batch in micro_batches(step):
            used.append([])
            loss = model(**batch).loss / 2
            loss.backward()
            total += loss.item()
            experts.append(used[-1])
        used[:] = [*used[: -len(experts)], experts]
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model, optimizer), used


def offloaded(model, run, slots, *, precision="fp32", placement=None, **options):
    placement = {"recomputed_fraction": 1.0, "expert_slots": slots, **(placement or {})}
    return holdfast.offload(
        model, adamw(model), run, precision=precision, placement=holdfast.Placement(**placement), **options
    )


def train(run, steps, slots, **options):
    """The losses of ``steps`` by number, and the engine."""
    with offloaded(options.pop("model", None) or mixture(), run, slots, **options) as engine:
        return [engine.step(micro_batches(step)) for step in steps], engine


def reads(used):
    """How often an expert is read in a step where one is held at a time, by the experts that the step used."""
    order = [(block, e) for block in range(BLOCKS - 1) for each in used for e in each[block]]
    for block in reversed(range(BLOCKS)):
        for each in used:
            order += [(block, e) for e in (*each[block], *reversed(each[block]))]
    return order
