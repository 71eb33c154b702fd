"""MeZO in an ordinary loop, and out of core as it is made for comparison."""

from __future__ import annotations

from functools import cache

import holdfast
from holdfast.optim import MeZO
from plain_loops import model_with_a_frozen_parameter
from support.grouped import grouped
from training import batches, state_of, warm_up

STEPS = 6


def mezo(model, **options):
    """Matrices decay, vectors do not. Frozen parameters are among them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return MeZO(groups, lr=1e-3, seed=7, **options)


def of_trained(model, optimizer):
    """The state that a commit has: that of frozen parameters is their value."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state = state_of(model, optimizer).items()
    return {
        key: value for key, value in state if key.endswith("/param") or key.rpartition("/")[0] not in frozen
    }


def plain_loop(model, made, steps=STEPS, weights=None, schedule=warm_up):
    """Losses, and the state after each step; ``made`` gives the micro-batches of a step."""
    optimizer = mezo(model)
    scheduler, losses, states = schedule(optimizer), [], []
    with holdfast.keyed_rng(model) as keys:
        for step in range(steps):
            found = made(step)

            def loss(step=step, found=found):
                of_each = []
                for m, batch in enumerate(found):
                    keys.at(step, m)
                    value = model(**batch)
                    of_each.append(float(getattr(value, "loss", value)))
                if weights is None:
                    return sum(of_each) / len(found)
                return sum(w * (each if w else 0.0) for w, each in zip(weights(found), of_each))

            losses.append(optimizer.step(loss))
            scheduler.step()
            states.append(of_trained(model, optimizer))
    return losses, states


@cache
def reference(num_micro_batches, dropout=0.1):
    return plain_loop(model_with_a_frozen_parameter(dropout), lambda step: batches(step, num_micro_batches))


def offload(model, directory, **options):
    optimizer = mezo(model)
    settings = {"dtype": "fp32", "scheduler": warm_up(optimizer), **options}
    return holdfast.offload(model, optimizer, directory, **grouped(**settings))
