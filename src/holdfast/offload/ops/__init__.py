"""Handlers that carry out each kind of operation. One file per concern, one function per kind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ...plan.ops import Op
from ..runtime import Runtime, Step
from . import commit, compute, gradients, inputs, params, rollback, state, zeroth

KINDS: dict[str, Callable[[Runtime, Op, Step], Future | None]] = {
    "load_params": params.load,
    "gather_params": params.gather,
    "upload_params": params.upload,
    "store_params": params.store,
    "forward": compute.forward,
    "evaluate": compute.evaluate,
    "backward": compute.backward,
    "check_losses": compute.check_losses,
    "download_input": inputs.download,
    "upload_input": inputs.upload,
    "store_input": inputs.store,
    "load_input": inputs.load,
    "download_input_grad": inputs.download_grad,
    "upload_input_grad": inputs.upload_grad,
    "download_grads": gradients.download,
    "upload_grads": gradients.upload,
    "reduce_grads": gradients.reduce,
    "store_grads": gradients.store,
    "load_grads": gradients.load,
    "norm_block": gradients.norm_block,
    "norm": gradients.norm,
    "load_state": state.load,
    "update": state.update,
    "store_state": state.store,
    "download_resident_grads": state.download_resident_grads,
    "reduce_resident": gradients.reduce_resident,
    "update_resident": state.update_resident,
    "gather_resident": params.gather_resident,
    "upload_resident": state.upload_resident,
    "store_resident": state.store_resident,
    "load_frozen": zeroth.load_frozen,
    "displace": zeroth.displace,
    "displace_resident": zeroth.displace_resident,
    "upload_displaced_resident": zeroth.upload_displaced_resident,
    "displaced": compute.displaced,
    "measure_slope": zeroth.measure_slope,
    "catch_up": zeroth.catch_up,
    "catch_up_resident": zeroth.catch_up_resident,
    "commit": commit.commit,
}

REDO: dict[str, Callable[[Runtime, Op, Step], Future | None]] = {
    "load_state": rollback.load,
    "load_grads": rollback.load_grads,
    "update": rollback.update,
    "store_state": rollback.store,
}
"""Handlers of operations that run only where a guess was wrong, for kinds that need another one then."""


def handlers(runtime: Runtime) -> dict[str, Callable[[Op, Any], Future | None]]:
    """Return the handler of every kind of operation, bound to ``runtime``."""
    return {kind: partial(_handle, runtime, function) for kind, function in KINDS.items()}


def _handle(
    run: Runtime, function: Callable[[Runtime, Op, Step], Future | None], op: Op, step: Step
) -> Future | None:
    with run.device.lane(op):
        future = (REDO.get(op.key.kind, function) if op.redo else function)(run, op, step)
    over = run.device.ended(op)
    return future or over
