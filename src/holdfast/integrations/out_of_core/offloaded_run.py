"""One call of a ``Trainer``'s ``train`` whose optimizer steps are done by the out-of-core engine.

1. Before a step's batches are fetched, the state of the trainer is taken. It is part of the engine's commit of the
   step.
2. At the first micro-batch the engine does the whole step: each micro-batch runs the trainer's own ``training_step``,
   whose backward pass is left to the engine. The commit also gets the results of the step: losses, gradient norm,
   metrics.
3. The trainer's loop goes through the micro-batches and gets their losses; the optimizer's own step does nothing.

A resume goes back to 1, fetches the same batches, and gives the loop the results that the commit has. So callbacks,
log, evaluation and saving of the newest step are repeated, and nothing of it is computed again. Called by
``offloaded_trainer``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import Trainer
from transformers.trainer_utils import has_length

from ...errors import BadInput
from ...offload.api import offload
from ...offload.engine import Engine
from ...offload.model.microbatches import OwnCall
from ...state.encoding import decode, encode
from ...state.progress import hyper_parameters, random_state, restore_random_state
from ..trainer_run import Training
from . import generation
from .model_calls import tensors_of
from .script_model import (
    do_nothing,
    left_to_the_engine,
    names_outside_optimizer,
    precision_of,
    refuse_clipping_of_others,
    refuse_other_norm,
)
from .several_processes import AgreedControl, refuse_unlike_processes, set_remainder


class _Fetched(NamedTuple):
    """A micro-batch."""

    batch: Any
    num_items: Any
    """The number that its loss is divided by; None if it is divided by ``of``."""
    of: int
    """The number of micro-batches that were fetched with it, itself included."""


class OffloadedTraining(Training):
    """One call of ``train`` with its engine, which treats this object as the loader."""

    def __init__(self, trainer: Trainer, run: Path, options: dict[str, Any]) -> None:
        super().__init__(trainer, run, options)
        self.engine: Engine | None = None
        self._first_step = 0
        """The engine's number of steps when the trainer had done none."""
        self._state_before: dict[str, Any] | None = None
        """The state of the trainer before the present step; None before the first."""
        self._group: list[_Fetched] = []
        """The micro-batches of the present step."""
        self._carried: list[_Fetched] = []
        """Micro-batches whose step comes with the next group, as their pass over the data ended before a whole one."""
        self._losses: list[float] = []
        """The losses of the present step that the loop has not got yet."""
        self._counted_step = -1
        """The number of steps that the trainer had counted when the engine did the present one."""
        self._norm = trainer.args.max_grad_norm
        """The norm that the engine clips to, as the trainer had it."""
        self._has_gradients = False
        """True if training in memory would have gradients now that its optimizer's step has not used."""
        self._hyper: list[dict[str, Any]] = []
        """The hyper-parameters that the engine has done the present step with."""
        self._loss = threading.local()
        """The loss that the micro-batch on this thread would go backward from, and ``fetched_with``."""
        self._processes = trainer.args.world_size
        self._agreed = AgreedControl(trainer)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._agreed.close()
        if self.engine is None or error[0] is None or self.engine.is_closed:
            return
        if self._processes == 1:
            self.engine.__exit__(*error)
            return
        with suppress(Exception):
            self.engine.wait()
        self.engine.give_up()  # the others may never come to a close: they get an error at their next call

    # Opening

    def open(self, loader: Any) -> Engine:
        """Open or resume the run. Optimizer and schedule exist, and no step of this call was done."""
        trainer = self._trainer
        optimizer: Any = trainer.optimizer
        assert trainer.model is not None
        self._watch_loader(loader)
        self._watch_attributes()
        if self._processes > 1:
            batches = len(loader) if has_length(loader) else None
            refuse_unlike_processes({"batches in an epoch": batches, **self._same()})
        optimizer.step = MethodType(left_to_the_engine(self._end_optimizer_step), optimizer)
        norm, fetched = self._norm, trainer.args.gradient_accumulation_steps
        if norm and norm > 0:
            refuse_clipping_of_others(names_outside_optimizer(trainer.model, optimizer))
        usual: dict[str, Any] = {
            "device": str(trainer.args.device),
            "precision": precision_of(trainer.model, mixed=trainer.args.bf16),
            "clipping": norm if norm and norm > 0 else float("inf"),
            "micro_batches": fetched if has_length(loader) else 2 * fetched - 1,  # with batches carried over
        }
        self.engine = offload(
            trainer.model, optimizer, self._run, loader=self, normalize="sum", **(usual | self._options)
        )
        self.engine.held.until_unguard(_ZeroGrad(trainer.model, do_nothing))
        self.engine.held.until_unguard(_ZeroGrad(optimizer, self._zero_grad))
        self.engine.held.refuse_gradients("log grad_norm, and leave out what reads or changes gradients")
        inner = getattr(trainer.model, "get_base_model", lambda: trainer.model)()  # its generate calls itself
        self.engine.take_calls(
            [trainer.model, *[inner] * (inner is not trainer.model)], self._refuse_amid_step
        )
        if self._processes > 1 and hasattr(inner, "generate"):
            self.engine.held.until_unguard(generation.EqualPasses(inner))
        if self._restored is None:
            self._first_step = self.engine.steps_done
            generation.begin(trainer)
        return self.engine

    # Replacements of the trainer's methods

    def begin_epoch(self, args: Any, state: Any, control: Any) -> Any:
        control = super().begin_epoch(args, state, control)
        if self._restored is None:
            self._agree(control, "the beginning of the trainer's epoch")
        return control

    def run_epoch(self, **loop: Any) -> None:
        """Run an epoch; one that the run has completed is skipped."""
        if self._restored is None:
            self._place = replace(
                self._place, epoch=loop["epoch"], random=encode(self._order.now()), updates=0
            )
            self._run_epoch(**loop)
        elif loop["epoch"] == self._restored["place"]["epoch"]:
            found, self._restored = self._restored, None
            self._first_step = found["first_step"]
            self._trainer.lr_scheduler.load_state_dict(found["schedule"])  # type: ignore[union-attr]
            restore_random_state(found["random"])
            if not found["place"]["updates"]:
                self._order.put_back(decode(found["place"]["random"]))
            self._go_on(found, loop)

    def end_step(self, tr_loss: Any, grad_norm: Any, *rest: Any, **options: Any) -> None:
        """Count the step. Called at the end of every optimizer step, and again at the end of an epoch."""
        if self._trainer.state.global_step > self._recorded_step:
            self._recorded_step = self._trainer.state.global_step
            self._place.updates += 1
        acts = self._agree(self._trainer.control, "the end of the trainer's step")
        self._end_step(tr_loss, grad_norm, *rest, **options)
        if acts:
            self._agree(self._trainer.control, "the end of the trainer's log, evaluation and save")

    def _agree(self, control: Any, where: str) -> bool:
        """Let all processes go on alike, and return whether they log, evaluate or save. See ``AgreedControl``."""
        return self._agreed.agree(self._opened, control, where)

    # Steps

    def before_step(self) -> None:
        """Take the state of the trainer. Called before the batches of a step are fetched."""
        self._state_before = super().state_dict() | {
            "begun": True,
            "first_step": self._first_step,
            "schedule": self._trainer.lr_scheduler.state_dict(),  # type: ignore[union-attr]
            "random": random_state(),
        }

    def fetched(self, batches: list[Any], num_items: Any, is_whole: bool) -> None:
        """Note the micro-batches of the step, and the number of items that their losses are divided by.

        After a group that is not whole, at the end of a pass over an ``IterableDataset``, the trainer does no step. Its
        gradients are part of the next step, whose losses then contain its own.
        """
        group = [_Fetched(batch, num_items, len(batches)) for batch in batches]
        if batches and not is_whole:
            self._carried, self._losses = self._carried + group, [0.0] * len(batches)
        elif batches:
            self._group, self._carried, self._losses = self._carried + group, [], []
        active: Any = self._trainer.accelerator.gradient_state.active_dataloader
        if active is not None and active is not self._loader:
            set_remainder(active, self._loader)

    def loss(self, training_step: Callable[..., Any], prepare: Callable[..., Any]) -> torch.Tensor:
        """Return the loss of the next micro-batch, as the trainer adds it up. The first call does the whole step.

        Args:
            training_step: The trainer's own method.
            prepare: Its own ``_prepare_inputs``.
        """
        if not self._losses:
            engine, group = self._opened, self._group
            self._trainer.model.train()  # type: ignore[union-attr]  # TRL's log asks it
            refuse_other_norm("args.max_grad_norm", self._norm, self._trainer.args.max_grad_norm)
            self.refuse_other_accumulation()
            self._hyper = self._hyper_now()
            if engine.steps_done - self._first_step > self._trainer.state.global_step:
                self._losses = self._taken_results(group[-1].of)
            elif group:
                self._do_step(training_step, prepare)
                assert engine.results is not None
                self._losses = list(engine.results["losses"])
            self._group = []  # of many tokens
        self._has_gradients = True
        return torch.tensor(self._losses.pop(0), dtype=torch.float32, device=self._trainer.args.device)

    @property
    def fetched_with(self) -> int | None:
        """The number of micro-batches that were fetched with the one on this thread, itself included.

        None outside of micro-batches.
        """
        return getattr(self._loss, "fetched_with", None)

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The norm of the newest step's gradient before it was clipped; NaN if the step was skipped without one."""
        assert self._opened.results is not None
        norm = self._opened.results["grad_norm"]
        return torch.tensor(float("nan") if norm is None else norm, dtype=torch.float32)

    def _refuse_amid_step(self) -> None:
        """Raise ``BadInput`` where the engine has done a step that the trainer has not counted yet."""
        if self._trainer.state.global_step == self._counted_step:
            raise BadInput(
                "the model was called in the middle of an optimizer step (on_substep_end, on_pre_optimizer_step or"
                " on_optimizer_step), where it has the weights after the step already: call it in on_step_begin or"
                " on_step_end"
            )

    def _end_optimizer_step(self, closure: Any = None) -> None:
        """Take the place of the optimizer's ``step``. Raises ``BadInput`` if the step was done with other rates."""
        if self._hyper_now() != self._hyper:
            raise BadInput(
                f"the optimizer's param_groups were changed in the middle of step {self._opened.steps_done}"
                " (on_substep_end, on_pre_optimizer_step or training_step), which the engine had done before with what"
                " they were: change them in on_step_begin or on_step_end. The run has this step; begin it again in"
                " another directory if the step counts."
            )

        self._has_gradients = False

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Take the place of the optimizer's ``zero_grad``. Raises ``BadInput`` where that would drop gradients."""
        if self._has_gradients:
            raise BadInput(
                "optimizer.zero_grad() was called between a backward pass and the optimizer's step (on_substep_end,"
                " on_pre_optimizer_step or training_step), which drops gradients of a step that the engine has done"
                " with all of them: leave it out, or call it in on_step_begin or on_step_end"
            )

    def _hyper_now(self) -> list[dict[str, Any]]:
        return hyper_parameters(self._trainer.optimizer.param_groups)  # type: ignore[union-attr]

    @property
    def _opened(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _taken_results(self, count: int) -> list[float]:
        """Set what training changed in the trainer when the step was done, before a process ended.

        Returns the losses of the ``count`` micro-batches. Where another number of processes did the step, each loss is
        a part of the mean that the log has.
        """
        assert self._opened.results is not None
        if self._attributes is not None:
            self._attributes.restore(self._opened.results["attributes"])
        self._counted_step = self._trainer.state.global_step
        if (generated := self._opened.results.get("generated")) is not None:
            generation.restore(self._trainer, generated)
        if not self.of_ranks:
            return list(self._opened.results["losses"])
        each, self.of_ranks = [sum(state["results"]["losses"]) for state in self.of_ranks], []
        return count * [sum(each) / len(each) / count]

    def _do_step(self, training_step: Callable[..., Any], prepare: Callable[..., Any]) -> None:
        trainer, model = self._trainer, self._trainer.model
        batches: list[Any] = [each.batch for each in self._group]
        assert model is not None
        accelerator: Any = trainer.accelerator
        takes_loss = takes_only_the_loss(trainer)
        results: dict[str, Any] = {"losses": None, "attributes": None}
        losses: list[torch.Tensor | None] = [None] * len(batches)
        if generation.generates(type(trainer)):
            batches = generation.prepared(trainer, batches, prepare)
            results["generated"] = generation.changed(trainer)
        calls = [
            OwnCall(
                self._call(training_step, m, batch, losses, results), tensors_of(batch), results, takes_loss
            )
            for m, batch in enumerate(batches)
        ]
        with references(trainer, self._opened, batches):
            vars(accelerator)["backward"] = self._leave_backward
            set_syncs, syncs = accelerator.gradient_state._set_sync_gradients, accelerator.sync_gradients
            ends = model.register_forward_hook(  # losses ask it, as TRL's control of the entropy does
                lambda *_: set_syncs(losses.count(None) == 1)
            )
            self._counted_step = trainer.state.global_step
            try:
                self._opened.step(calls)
            finally:
                ends.remove()
                set_syncs(syncs)
                del vars(accelerator)["backward"]

    def _call(
        self,
        training_step: Callable[..., Any],
        m: int,
        batch: Any,
        losses: list[torch.Tensor | None],
        results: dict[str, Any],
    ) -> Callable[[], Any]:
        """Return micro-batch ``m`` as a function; the last to run fills the ``results`` of the step."""
        model, fetched = self._trainer.model, self._group[m]
        carried = len(self._group) - self._group[-1].of

        def call() -> torch.Tensor:
            self._trainer.accelerator.gradient_state._set_sync_gradients(m == len(losses) - 1)
            self._loss.fetched_with = fetched.of
            try:
                returned = training_step(model, batch, fetched.num_items)
            finally:
                del self._loss.fetched_with
            left = vars(self._loss).pop("value", None)
            if left is None:
                raise BadInput(
                    "training_step has not called accelerator.backward(loss), which leaves the backward pass to the"
                    " engine: call it in the place of loss.backward()"
                )
            losses[m] = returned.detach().reshape(())
            there = [each for each in losses if each is not None]
            if len(there) == len(losses):
                values = torch.stack(there).tolist()  # a device is waited for once in a step
                results["losses"] = [sum(values[: carried + 1]), *values[carried + 1 :]]
                if self._attributes is not None:
                    results["attributes"] = without_reference_flag(self._attributes.changed())
            return left

        return call

    def _leave_backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Take the place of ``Accelerator.backward``, whose gradients of several losses add up, and of DDP.

        DDP takes the mean of all processes' gradients; the engine adds them up.
        """
        divided = loss / (self._trainer.accelerator.gradient_accumulation_steps * self._processes)
        before = getattr(self._loss, "value", None)
        self._loss.value = divided if before is None else before + divided

    # The loader's interface for the engine

    def state_dict(self) -> dict[str, Any]:
        if self._state_before is None:
            return {"same": self._same(), "begun": False}
        return self._state_before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["begun"]:
            super().load_state_dict(state)
            self._state_before = state


class _ZeroGrad:
    """Puts ``takes_place`` in the place of ``owner.zero_grad``, until ``remove``: that would read gradients."""

    def __init__(self, owner: Any, takes_place: Callable[..., None]) -> None:
        self._attributes = vars(owner)
        self._attributes["zero_grad"] = takes_place

    def remove(self) -> None:
        self._attributes.pop("zero_grad", None)


def takes_only_the_loss(trainer: Trainer) -> bool:
    """Return whether the loss is the one that the model returns, and nothing else of its result is used."""
    own = type(trainer).compute_loss is not Trainer.compute_loss
    return not own and trainer.compute_loss_func is None and trainer.label_smoother is None


FLAG = "precompute_ref_logps"
"""The attribute of TRL's trainer that is True if batches have the reference's log-probabilities."""
NAMES = "ref_chosen_logps", "ref_rejected_logps"
"""The names that TRL gives them in a batch."""
OF_SINGLE = ("ref_logps",)
"""The name in a batch of KTO, whose samples are not pairs."""


def is_needed(trainer: Any) -> bool:
    """Return whether the trainer's loss calls its own model as the reference."""
    return getattr(trainer, FLAG, None) is False and getattr(trainer, "ref_model", None) is None


def refuse_reference(trainer: Any) -> None:
    """Raise ``BadInput`` if the reference is another adapter of the model, or a loss needs a second forward pass."""
    if getattr(trainer, "calculate_KL", False):
        raise BadInput(
            f'loss_type="{trainer.args.loss_type}" of KTO calls the model a second time for its estimate of the'
            ' divergence, and the engine calls it once: use loss_type="apo_zero_unpaired"'
        )
    if is_needed(trainer) and "ref" in getattr(trainer.model, "peft_config", ()):
        raise BadInput(
            "the reference is the adapter 'ref' of the model, which the engine does not switch to. Give"
            " precompute_ref_log_probs=True."
        )


@contextmanager
def references(trainer: Any, engine: Engine, batches: Sequence[Any]) -> Iterator[None]:
    """Give each of ``batches`` the reference's log-probabilities, which the trainer's loss uses in the context.

    For TRL's DPO and KTO, where the reference is the model without its adapter: TRL's loss calls the model twice, the
    second time with the adapter switched off, and the engine calls it once in a pass. So a pass without the adapter
    comes first, over all micro-batches, as if TRL had computed them before training (``precompute_ref_log_probs``).
    """
    if not is_needed(trainer):
        yield
        return
    model, names = trainer.model, OF_SINGLE if hasattr(trainer, "calculate_KL") else NAMES
    with model.disable_adapter():
        vars(model)["disable_adapter"] = nullcontext  # the trainer's own call, in the middle of a pass
        try:
            made = engine.run_calls([partial(_log_probs, trainer, batch) for batch in batches])
        finally:
            del vars(model)["disable_adapter"]
    for batch, found in zip(batches, made, strict=True):
        batch.update(zip(names, found))
    setattr(trainer, FLAG, True)
    try:
        yield
    finally:
        setattr(trainer, FLAG, False)


def without_reference_flag(changed: dict[str, Any]) -> dict[str, Any]:
    """Return the ``changed`` attributes without the flag, which a step sets for its own time."""
    changed["values"].get("trainer", {}).pop(FLAG, None)
    return changed


def _log_probs(trainer: Any, batch: Any) -> tuple[Any, Any]:
    return trainer.compute_ref_log_probs(trainer.model, trainer._prepare_inputs(batch))
