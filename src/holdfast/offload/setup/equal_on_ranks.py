"""Checks that all ranks were given the same arguments, before anything depends on them.

Each rank has only its shard of a tensor. A learning rate, seed or schedule that differs on one rank would give a state
that no single process computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import xxhash

from ...distributed import Ranks
from ...errors import BadInput
from ...optim.joined import kind_name
from ...schedule.memory_use import predict
from ...schedule.planner.placement import ORDER
from ...schedule.work import BlockPlacement, StepShape
from ..model.model_parts import ModelParts
from ..offload_options import StepRules
from .step_planning import LISTS, RunPlan


def agree_on_choices(
    ranks: Ranks,
    parts: ModelParts,
    optimizer: torch.optim.Optimizer,
    rules: StepRules,
    choices: Mapping[str, Any],
    given: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ``BadInput`` on all ranks unless model, optimizer, hyper-parameters, rules and choices are the same on all.

    ``given`` are the optimizer's parameter groups. Collective: every rank must call this.
    """
    if ranks.alone:
        return
    loss_scale = None if rules.loss_scale is None else asdict(rules.loss_scale)
    atoms = {key: [atom["dtype"], atom["shape"]] for key, atom in parts.unsharded().index()["atoms"].items()}
    mine = {
        **choices,
        "schedule": rules.schedule,
        "loss_scale": loss_scale,
        "clipping": rules.clipping,
        "commit_every": rules.commit_every,
        "the blocks": parts.blocks.names,
        "the optimizer": kind_name(optimizer),
        **hyper_parameters_by_key(given),
        **atoms,
    }
    agree(ranks, "arguments", mine, "Give holdfast.offload the same on all; nothing was written")


def agree_on_placement(plan: RunPlan, schedule: str, shape: StepShape, ranks: Ranks) -> RunPlan:
    """Return ``plan`` with a placement that fits on all ranks: of each kind the fewest blocks that any rank keeps.

    Collective: every rank must call this.
    """
    gathered = ranks.everyone((plan.placement, plan.evaluation_batches))
    if all(each == gathered[0] for each in gathered):
        return plan
    least = {kind: min((getattr(each, kind) for each, _ in gathered), key=sum) for kind in ORDER}
    placement, together = BlockPlacement(**least), min(count for _, count in gathered)
    order = LISTS[schedule]
    shape = replace(
        shape, delayed_fraction=plan.delayed_fraction, recomputed_fraction=plan.recomputed_fraction
    )
    return replace(
        plan,
        placement=placement,
        evaluation_batches=together,
        operations=order(plan.work, placement, shape),
        memory=plan.memory and predict(plan.work, placement, shape, order, together),
    )


def hyper_parameters_by_key(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the hyper-parameters of all ``groups``, keyed by the expression with which a script reaches each."""
    return {
        f"param_groups[{i}][{key!r}]": value for i, group in enumerate(groups) for key, value in group.items()
    }


def agree(ranks: Ranks, what: str, mine: Mapping[str, Any], way_out: str) -> None:
    """Raise ``BadInput`` on all ranks unless the JSON values ``mine`` are the same on all.

    The error names the first value that differs. Collective: every rank must call this.
    """
    if not ranks.alone and len(set(ranks.everyone(digest(mine)))) > 1:
        refuse_unlike(ranks.everyone(dict(mine)), what, way_out)


def digest(values: Any) -> str:
    """Return a digest of ``values``, which are JSON; equal values have equal digests."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def refuse_unlike(told: Sequence[Mapping[str, Any]], what: str, way_out: str) -> None:
    """Raise ``BadInput`` for the first value of ``told`` (one mapping per rank) that differs from rank 0's."""
    for rank, here in enumerate(told):
        for key in dict.fromkeys([*told[0], *here]):
            one, other = (values.get(key, "absent") for values in (here, told[0]))
            if one != other:
                raise BadInput(
                    f"the ranks have unlike {what}: {key} is {one} on rank {rank} and {other} on rank 0. {way_out}."
                )
