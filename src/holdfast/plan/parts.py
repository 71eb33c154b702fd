"""The parts of which both orders are made: moving parameters and block inputs, updating, committing.

``Schedule`` collects operations; its methods append those that belong together and know the slots: how many
buffers of a kind exist, and therefore which earlier operation must be over before the next may start.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import ops
from .ops import Hold, Key, Op
from .work import Placement, StepShape, Work

PARAM_SLOTS = 2
"""Blocks whose parameters are in memory at once: the one that computes and the next."""
STATE_SLOTS = 3
"""Blocks whose optimizer state is in memory at once: being read, updated, written."""
GRAD_SLOTS = 3
"""Blocks whose gradients are in memory at once, unless all are kept: accumulating, waiting, being consumed."""
INPUT_SLOTS = 4
"""Block inputs on their way to or from the SSD."""


def _earlier(done: Sequence[Key], index: int, slots: int) -> tuple[Key, ...]:
    """What must be over before use ``index`` of something of which there are ``slots``."""
    return (done[index - slots],) if index >= slots else ()


class Schedule:
    """A growing list of operations for one step of ``work``.

    ``keeps_grads``: gradients of every block are kept until the backward pass is over, rather than
    consumed block by block.
    """

    def __init__(self, work: Work, placement: Placement, shape: StepShape, keeps_grads: bool) -> None:
        self.work, self.placement, self.shape = work, placement, shape
        self.keeps_grads = keeps_grads
        self.ops: list[Op] = []
        self.uploads: list[Key] = []  # in the order of the passes over blocks
        self.pass_ends: list[Key] = []  # the last computation of each pass
        self.updated: list[Key] = []
        self.stored_state: list[Key] = []
        self.spilled: list[Key] = []
        self.stored_inputs: list[Key] = []
        self.loaded_inputs: list[Key] = []  # computations that used up an input read from the SSD

    @property
    def count(self) -> int:
        return len(self.work.blocks)

    def add(self, key: Key, lane: str, **fields) -> Key:
        self.ops.append(Op(key, lane, **fields))
        return key

    # Parameters

    def load_params(self, block: int, phase: str, micro_batch: int = -1) -> Key:
        """Bring a block's working copy to the device; returns the operation after which it is there."""
        size = self.work.blocks[block].param_bytes
        key = Key("upload_params", block, micro_batch, phase)
        self.uploads.append(key)
        slot_free = _earlier(self.pass_ends, len(self.uploads) - 1, PARAM_SLOTS)
        name = ("params", phase, block, micro_batch)
        first_use = phase != "backward" and micro_batch <= 0
        if self.placement.params[block]:
            before = (Key("update", block),) if first_use or self._only_pass(block, micro_batch) else ()
            needs, taken, given = slot_free, (), ()
        else:
            before = (Key("store_params", block),) if first_use or self._only_pass(block, micro_batch) else ()
            load = self.add(
                Key("load_params", block, micro_batch, phase),
                ops.SSD_READ,
                nbytes=size,
                needs=slot_free,
                needs_previous=before,
                takes=(Hold(name, size),),
            )
            before, needs, taken, given = (), (load,), (), (name,)
        if self.work.unified:
            given = ()
        else:
            taken = (Hold(("device", *name), size, "device"),)
        return self.add(
            key, ops.UPLOAD, nbytes=size, needs=needs, needs_previous=before, takes=taken, gives=given
        )

    def _only_pass(self, block: int, micro_batch: int) -> bool:
        """The last block has no forward pass of its own, so its first use is its backward pass; and if it is
        the only block, the next micro-batch's parameters are loaded beside it."""
        return block == self.count - 1 and (micro_batch <= 0 or self.count == 1)

    def release_params(self, block: int, phase: str, micro_batch: int = -1) -> tuple[tuple, ...]:
        """The buffers that the last computation of a pass gives back."""
        name = ("params", phase, block, micro_batch)
        if not self.work.unified:
            return (("device", *name),)
        return () if self.placement.params[block] else (name,)

    # Block inputs and their gradients

    def keep_input(self, block: int, micro_batch: int, made_by: Key) -> Key:
        """Keep the input of ``block`` until its backward pass; returns the operation after which it is kept."""
        size = self.work.input_bytes
        name = ("input", block, micro_batch)
        kept = self.add(
            Key("download_input", block, micro_batch),
            ops.DOWNLOAD,
            nbytes=size,
            needs=(made_by,),
            takes=(Hold(name, size),),
        )
        return kept

    def on_ssd(self, block: int) -> bool:
        """Does the input of ``block`` go to the SSD? The last block's never does: it is used at once."""
        return block < self.count - 1 and not self.placement.activations[block]

    def store_input(self, block: int, micro_batch: int, used_by: Key) -> None:
        """Send a kept input to the SSD once its forward pass has used it."""
        if not self.on_ssd(block):
            return
        name = ("input", block, micro_batch)
        slot_free = _earlier(self.stored_inputs, len(self.stored_inputs), INPUT_SLOTS)
        staged = ("staged", block, micro_batch)
        key = self.add(
            Key("store_input", block, micro_batch),
            ops.SSD_WRITE,
            nbytes=self.work.input_bytes,
            needs=(used_by, *slot_free),
            takes=(Hold(staged, self.work.input_bytes),),
            gives=(staged, name),
        )
        self.stored_inputs.append(key)

    def fetch_input(self, block: int, micro_batch: int, phase: str) -> Key:
        """Bring a kept input back to the device."""
        size, name = self.work.input_bytes, ("input", block, micro_batch)
        needs: tuple[Key, ...] = (Key("download_input", block, micro_batch),)
        if phase == "backward" and block < self.count - 1:  # until then it is the forward pass's to use
            needs += (Key("forward", block, micro_batch),)
        if phase == "backward" and self.on_ssd(block):
            slot_free = _earlier(self.loaded_inputs, len(self.loaded_inputs), INPUT_SLOTS)
            self.loaded_inputs.append(Key("backward", block, micro_batch))
            needs = (
                self.add(
                    Key("load_input", block, micro_batch),
                    ops.SSD_READ,
                    nbytes=size,
                    needs=(Key("store_input", block, micro_batch), *slot_free),
                    takes=(Hold(name, size),),
                ),
            )
        return self.add(Key("upload_input", block, micro_batch, phase), ops.UPLOAD, nbytes=size, needs=needs)

    def keep_input_grad(self, block: int, micro_batch: int, made_by: Key) -> Key:
        """Keep the gradient of a block's input until the block before it wants it."""
        size = self.work.input_bytes
        name = ("input_grad", block, micro_batch)
        return self.add(
            Key("download_input_grad", block, micro_batch),
            ops.DOWNLOAD,
            nbytes=size,
            needs=(made_by,),
            takes=(Hold(name, size),),
        )

    def fetch_input_grad(self, block: int, micro_batch: int) -> Key:
        return self.add(
            Key("upload_input_grad", block, micro_batch),
            ops.UPLOAD,
            nbytes=self.work.input_bytes,
            needs=(Key("download_input_grad", block, micro_batch),),
        )

    def backward_inputs(self, block: int, micro_batch: int) -> tuple[tuple[Key, ...], tuple[tuple, ...]]:
        """What a backward computation waits for, and what it uses up. A model of one block has the
        prologue's output on the device when its only block runs."""
        needs: tuple[Key, ...] = ()
        given: tuple[tuple, ...] = ()
        if self.count > 1:
            needs += (self.fetch_input(block, micro_batch, "backward"),)
            given += (("input", block, micro_batch),)
        if block < self.count - 1:
            needs += (self.fetch_input_grad(block + 1, micro_batch),)
            given += (("input_grad", block + 1, micro_batch),)
        return needs, given

    # Losses, norm, update, commit

    def check_losses(self, last: Key) -> Key:
        """All losses are known before the first update, so a step with a NaN among them is skipped whole."""
        return self.add(Key("check_losses"), ops.COMPUTE, needs=(last,))

    def update_block(self, block: int, *after: Key) -> None:
        """Update one block after ``after``: its gradients are on the host, and whatever else must be known."""
        b, on_host = self.work.blocks[block], self.placement.optimizer[block]
        image, out = ("state", block), ("params_out", block)
        needs: tuple[Key, ...] = after
        previous: tuple[Key, ...] = ()
        if on_host:
            previous = (Key("store_state", block),)
        else:
            slot_free = _earlier(self.stored_state, len(self.stored_state), STATE_SLOTS)
            needs += (
                self.add(
                    Key("load_state", block),
                    ops.SSD_READ,
                    nbytes=b.state_bytes,
                    needs=slot_free,
                    needs_previous=(Key("store_state", block),),
                    takes=(Hold(image, b.image_bytes),),
                ),
            )
        if self.keeps_grads and not self.placement.gradients[block]:
            slot_free = _earlier(self.updated, len(self.updated), GRAD_SLOTS)
            needs += (self.unspill_grads(block, self.shape.micro_batches - 1, slot_free),)
        params_to_ssd = not self.placement.params[block]
        updated = self.add(
            Key("update", block),
            ops.UPDATE,
            work=b.elements,
            needs=needs,
            needs_previous=previous,
            takes=(Hold(out, b.trained_param_bytes),) if params_to_ssd else (),
            gives=(self.host_grads(block),),
        )
        self.updated.append(updated)
        if params_to_ssd:
            self.add(
                Key("store_params", block),
                ops.SSD_WRITE,
                nbytes=b.trained_param_bytes,
                needs=(updated,),
                gives=(out,),
            )
        if not on_host:
            self.stored_state.append(self.store_state(block, updated, gives=(image,)))
        elif self.shape.commit:
            self.store_state(block, updated)

    def store_state(self, block: int, *after: Key, gives: tuple[tuple, ...] = ()) -> Key:
        """Write a block's state to a file that no kept commit names: the last commit has freed one."""
        return self.add(
            Key("store_state", block),
            ops.SSD_WRITE,
            nbytes=self.work.blocks[block].state_bytes,
            needs=after,
            needs_previous=(Key("commit"),) if after else (Key("update", block), Key("commit")),
            gives=gives,
        )

    def update_resident(self, *after: Key) -> None:
        """Update the prologue and epilogue after ``after``."""
        updated = self.add(
            Key("update_resident"),
            ops.UPDATE,
            work=self.work.resident_elements,
            needs=after,
            needs_previous=(Key("store_resident"),),
        )
        if self.shape.commit:
            self.store_resident(updated)

    def store_resident(self, *after: Key) -> None:
        """Write the state of the prologue and epilogue."""
        self.add(
            Key("store_resident"),
            ops.SSD_WRITE,
            nbytes=self.work.resident_state_bytes,
            needs=after,
            needs_previous=(Key("commit"),) if after else (Key("update_resident"), Key("commit")),
        )

    def commit(self) -> None:
        if self.shape.commit:
            stored = tuple(op.key for op in self.ops if op.key.kind in ("store_state", "store_resident"))
            self.add(Key("commit"), ops.COMMIT, needs=stored, needs_previous=(Key("commit"),))

    # Gradients of parameters

    def hand_over_grads(self, block: int, after: Key, host_held: bool = False) -> Key:
        """Bring a block's accumulated gradients to the host; returns when they may be consumed. While they
        wait for the global norm, their own norms are taken first and those that do not stay are spilled."""
        size, grads = self.work.blocks[block].grad_bytes, ("grads", block)
        key = self.add(
            Key("download_grads", block, self.shape.micro_batches - 1),
            ops.DOWNLOAD,
            nbytes=size,
            needs=(after,),
            takes=() if self.work.unified or host_held else (Hold(("host", *grads), size),),
            gives=() if self.work.unified else (grads,),
        )
        if self.shape.clip:
            key = self.add(Key("norm_block", block), ops.COMPUTE, needs=(key,))
        if self.keeps_grads and not self.placement.gradients[block]:
            key = self.spill_grads(block, self.shape.micro_batches - 1, key)
        return key

    def host_grads(self, block: int) -> tuple:
        """The name of a block's gradients on the host."""
        return ("grads", block) if self.work.unified else ("host", "grads", block)

    def spill_grads(self, block: int, micro_batch: int, after: Key) -> Key:
        """Write a block's gradients to the SSD and free their buffer."""
        return self.add(
            Key("store_grads", block, micro_batch),
            ops.SSD_WRITE,
            nbytes=self.work.blocks[block].grad_bytes,
            needs=(after,),
            gives=(self.host_grads(block),),
        )

    def unspill_grads(self, block: int, micro_batch: int, slot_free: tuple[Key, ...] = ()) -> Key:
        """Read spilled gradients back, as they were after ``micro_batch``."""
        size = self.work.blocks[block].grad_bytes
        return self.add(
            Key("load_grads", block, micro_batch),
            ops.SSD_READ,
            nbytes=size,
            needs=(Key("store_grads", block, micro_batch), *slot_free),
            takes=(Hold(self.host_grads(block), size),),
        )
