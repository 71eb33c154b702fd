"""The handlers that carry out each kind of operation: one file per concern, one function per kind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ...schedule.operations import Op
from ..memory.device import SeparateDevice
from ..runtime import Runtime, Step
from . import commit_ops, compute, gradient_ops, input_ops, mezo_ops, parameter_ops, state_ops

KindHandler = Callable[[Runtime, Op, Step], Future | None]
"""Function that does one kind of operation; its future ends when the operation is over."""
KINDS: dict[str, KindHandler] = {
    "load_params": parameter_ops.load,
    "gather_params": parameter_ops.gather,
    "upload_params": parameter_ops.upload,
    "store_params": parameter_ops.store,
    "forward": compute.forward,
    "evaluate": compute.evaluate,
    "backward": compute.backward,
    "check_losses": compute.check_losses,
    "download_input": input_ops.download,
    "upload_input": input_ops.upload,
    "store_input": input_ops.store,
    "load_input": input_ops.load,
    "download_input_grad": input_ops.download_grad,
    "upload_input_grad": input_ops.upload_grad,
    "download_grads": gradient_ops.download,
    "upload_grads": gradient_ops.upload,
    "reduce_grads": gradient_ops.reduce,
    "store_grads": gradient_ops.store,
    "load_grads": gradient_ops.load,
    "norm_block": gradient_ops.norm_block,
    "norm": gradient_ops.norm,
    "load_state": state_ops.load,
    "update": state_ops.update,
    "store_state": state_ops.store,
    "download_resident_grads": state_ops.download_resident_grads,
    "reduce_resident": gradient_ops.reduce_resident,
    "update_resident": state_ops.update_resident,
    "gather_resident": parameter_ops.gather_resident,
    "upload_resident": state_ops.upload_resident,
    "load_resident": state_ops.load_resident,
    "store_resident": state_ops.store_resident,
    "load_frozen": mezo_ops.load_frozen,
    "displace": mezo_ops.displace,
    "displace_resident": mezo_ops.displace_resident,
    "upload_displaced_resident": mezo_ops.upload_displaced_resident,
    "displaced": compute.displaced,
    "measure_slope": mezo_ops.measure_slope,
    "catch_up": mezo_ops.catch_up,
    "catch_up_resident": mezo_ops.catch_up_resident,
    "commit": commit_ops.commit,
}
REDO: dict[str, KindHandler] = {
    "load_state": commit_ops.load,
    "load_grads": commit_ops.load_grads,
    "update": commit_ops.update,
    "store_state": commit_ops.store,
}
"""Handlers of operations that run only where a guess was wrong, for kinds that need another one then."""


def handlers(runtime: Runtime) -> dict[str, Callable[[Op, Any], Future | None]]:
    """Return the handler of every kind of operation, bound to ``runtime``."""
    handle = _handle if runtime.device.unified else _handle_on_device
    return {kind: partial(handle, runtime, handler) for kind, handler in KINDS.items()}


def _handle(run: Runtime, handler: KindHandler, op: Op, step: Step) -> Future | None:
    return (REDO.get(op.key.kind, handler) if op.redo else handler)(run, op, step)


def _handle_on_device(run: Runtime, handler: KindHandler, op: Op, step: Step) -> Future | None:
    assert isinstance(run.device, SeparateDevice)
    with run.device.lane(op):
        future = _handle(run, handler, op, step)
    over = run.device.ended(op)
    return future or over
