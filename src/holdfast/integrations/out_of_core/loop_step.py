"""One optimizer step of the engine whose losses the script's own loop computes, one micro-batch after the other.

The engine takes all micro-batches of a step through a block while it is in memory, whereas a loop calls the model for
one of them, computes its loss, and only then comes to the next. Both keep their order:

1. At the loop's first call of the model, the engine's step begins on a thread of its own, with all micro-batches. Their
   arguments follow from the batches that were fetched ahead.
2. Where the model returns for a micro-batch, the engine waits, and the loop gets the output. The loop computes a loss,
   and its gradients with respect to the output.
3. The loop's next call, or its optimizer step, hands these to the engine, which goes backward from there.

A micro-batch that is not what step 1 has assumed is refused, and the step is
given up: its run is whole up to the step before. Called by the thread of the script's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from ...errors import BadInput, EngineFailed
from ...offload.engine import Engine
from ...offload.model.microbatches import Coroutine, OwnCall, without_autocast
from ...offload.rng import Turn, present_turn, share
from .model_calls import CallPattern, ModelCall, changed_setting, tensors_of


@dataclass
class _Output:
    """The model's output for a micro-batch, detached from the engine's graph."""

    micro_batch: int
    value: Any
    leaves: list[torch.Tensor]
    """Its tensors that the loss has gradients for."""


@dataclass
class _Loss:
    """A loss, and its gradient for each of the output's ``leaves``; None for one that it does not depend on."""

    value: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]


class LoopStep:
    """A step that the script's loop takes part in.

    Call order: ``output`` and ``take_loss`` for each micro-batch, then ``finish``; or ``abandon`` at any time.
    """

    def __init__(
        self,
        engine: Engine,
        model: Callable[..., Any],
        batches: Sequence[Any],
        settings: Callable[[], dict[str, Any]],
    ) -> None:
        """Prepare the step.

        Args:
            engine: The engine.
            model: The function that the loop's calls of the model run.
            batches: The batches of the step's micro-batches.
            settings: Returns the plain attributes of the model (``settings_of``).
        """
        self._engine, self._model, self._batches = engine, model, batches
        self._settings_now = settings
        self._settings: dict[str, Any] = {}
        """The plain attributes of the model when the loop last got an output."""
        self._calls: list[ModelCall] = []
        self._output: _Output | None = None
        """The newest output, until its loss is there."""
        self._loss: _Loss | None = None
        """The newest loss, until the engine has it."""
        self._number = 0
        """The number of outputs that the loop has got."""
        self._shared: SharedStep | None = None

    @property
    def is_complete(self) -> bool:
        """True if the losses of all micro-batches are there."""
        return self._number == len(self._batches) and self._loss is not None

    def output(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the model's output for the next micro-batch, which the loop has called with these arguments."""
        if self._output is not None:
            self._refuse(
                "the model was called again before accelerator.backward: a loss may call it once. Call"
                " model.eval() and use torch.no_grad() for an evaluation, between optimizer steps."
            )
        if self._number == len(self._batches):
            self._refuse(
                f"after {len(self._batches)} micro-batches, which are a step by gradient_accumulation_steps,"
                " optimizer.step() was not called: accumulate with accelerator.accumulate(model) alone"
            )
        if self._number == 0:
            like = CallPattern(args, kwargs, self._batches[0])
            self._calls = [like.of(batch) for batch in self._batches]
            self._shared = SharedStep(
                self._engine,
                [
                    OwnCall(partial(self._call, n), call.named_tensors | tensors_of(batch), {})
                    for n, (call, batch) in enumerate(zip(self._calls, self._batches, strict=True))
                ],
            )
            self._take(self._shared.begin())
        else:
            self._refuse_other(args, kwargs)
            self._go_on()
        if self._output is None or self._output.micro_batch != self._number:
            self._refuse(f"micro-batch {self._number} was not the next of the engine")
        self._number += 1
        return self._output.value

    def take_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of the newest output, as accumulation divides it, and compute its gradients."""
        output = self._output
        if output is None:
            self._refuse("accelerator.backward was called twice for one output: add the losses before")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            self._refuse("accelerator.backward got no scalar that depends on the model's output")
        self._refuse_other_parameters(loss, output.leaves)
        gradients = torch.autograd.grad(loss, output.leaves, allow_unused=True)
        if all(each is None for each in gradients):
            self._refuse("the loss does not depend on the newest output of the model")
        self._loss, self._output = _Loss(loss.detach().reshape(()), gradients), None

    def finish(self) -> None:
        """Let the engine finish the step."""
        self._go_on()

    def abandon(self) -> None:
        """Give the step up, with the engine. The run is whole up to the step before.

        A step that has just ended is given up as well: the loop does not know of it, and would not end its own part.
        """
        if self._shared is not None:
            self._shared.abandon()
            if not self._engine.is_closed:
                self._engine.give_up()

    # The engine's side

    def _call(self, number: int) -> torch.Tensor:
        """Return the loss of a micro-batch. Runs on the micro-batch's thread."""
        leaves, spec = pytree.tree_flatten(self._calls[number].run(self._model))
        given = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
        detached = [each.detach().requires_grad_() for each in given]
        remaining = iter(detached)
        parts = [next(remaining) if any(each is own for own in given) else each for each in leaves]
        assert self._shared is not None
        reply = self._shared.hand_over(_Output(number, pytree.tree_unflatten(parts, spec), detached))
        return _GoesBackward.apply(reply, *given)

    # The loop's side

    def _go_on(self) -> None:
        assert self._shared is not None
        if name := changed_setting(self._settings, self._settings_now()):
            self._refuse(
                f"the loop has changed {name} of the model in the middle of an optimizer step, and the engine computes"
                " all micro-batches of a step together: change it between steps"
            )
        loss, self._loss = self._loss, None
        self._take(self._shared.go_on(loss))

    def _take(self, event: Any) -> None:
        self._output = event if isinstance(event, _Output) else None
        self._settings = self._settings_now()

    def _refuse_other(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise ``BadInput`` if the next micro-batch was called with other arguments than the engine was given."""
        call = self._calls[self._number]
        if not call.is_called(args, kwargs):
            self._refuse(
                f"micro-batch {self._number + 1} of the step was called with other arguments than the first: the"
                " engine computes all of a step together, from the batches. Call the model alike for each."
            )
        if call.has_changed:
            self._refuse(
                "the loop has changed a batch in place, which the engine had computed with already: change it in the"
                " dataset or in collate_fn"
            )

    def _refuse_other_parameters(self, loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        """Raise ``BadInput`` if ``loss`` has gradients for other tensors than the output: they would be lost."""
        own = {id(leaf) for leaf in leaves}
        others = [each for each in _ends(loss) if id(each) not in own]
        if others:
            self._refuse(
                f"the loss depends on a parameter of shape {list(others[0].shape)} besides the model's output, and its"
                " gradient would be lost: compute that part in the model's forward"
            )

    def _refuse(self, text: str) -> NoReturn:
        self.abandon()
        raise BadInput(text)


class _GoesBackward(torch.autograd.Function):
    """The loss of the loop, as a function of the model's output in the engine's graph."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = loss.gradients
        return loss.value.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *(None if each is None else each * scale for each in ctx.gradients)


def _ends(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves that ``loss`` has gradients for."""
    if loss.grad_fn is None:
        yield loss
        return
    seen, left = {loss.grad_fn}, [loss.grad_fn]
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)


class GradientUse:
    """The gradients that training in memory would have, whose use must be that of the engine.

    The engine has the gradients of one step, and all of them. So the script must zero gradients after each step, and
    not between a backward pass and the optimizer's step. Called by the thread of the script's loop.
    """

    def __init__(self, refuse: Callable[[str], NoReturn], advice: str) -> None:
        """Begin without gradients.

        Args:
            refuse: Gives the step up and raises ``BadInput`` with a text.
            advice: What the script has to do so that gradients are zeroed after each step.
        """
        self._refuse, self._advice = refuse, advice
        self._exist = self._is_amid = False
        """True if there are gradients; and if they are those of a step that is not done."""

    def accumulated(self) -> None:
        """Note a backward pass. Refuses one that would add to the gradients of the step before."""
        if self._exist and not self._is_amid:
            self._refuse(
                "gradients were not zeroed since the step before. In memory they would be added to this step's, and the"
                f" engine has them no more: {self._advice}. That a script has set parameter.grad = None is not seen"
            )
        self._exist = self._is_amid = True

    def zeroed(self) -> None:
        """Note that gradients were zeroed. Refuses that between a backward pass and the optimizer's step."""
        if self._is_amid:
            self._refuse(
                "gradients were zeroed between a backward pass and the optimizer's step, which drops some of the step:"
                f" {self._advice}"
            )
        self._exist = False

    def stepped(self) -> None:
        """Note that the optimizer's step is done."""
        self._is_amid = False


class SharedStep:
    """A step of ``engine`` over the micro-batches of ``calls``, each of which calls ``hand_over`` once.

    The step runs on a thread of its own, and one of the two threads runs at a time. Called by the thread of the loop,
    except for ``hand_over``.

    Call order: ``begin``, then ``go_on`` for each micro-batch; or ``abandon`` at any time.
    """

    def __init__(self, engine: Engine, calls: Sequence[OwnCall]) -> None:
        self._engine = engine
        self._coroutine = Coroutine(partial(engine.step, calls), is_micro_batch=False)
        self._has_begun = self._is_inside_another = False
        self._turn: Turn | None = None
        """The step's turn to use the random generators, once a micro-batch has handed over; None if it is another's."""

    def begin(self) -> Any:
        """Run the step up to where the first micro-batch hands over, and return what it hands over."""
        self._has_begun = True
        self._is_inside_another = not present_turn().is_over
        with without_autocast():  # the engine's dtype is in the place of autocast
            return self._take(self._coroutine.start)

    def go_on(self, reply: Any) -> Any:
        """Give the waiting micro-batch its ``reply``, and return what the next hands over, or how the step ended."""
        if self._coroutine.finished:
            raise EngineFailed(
                "the step was given up, because the thread of its loop had ended, or because another accelerator of"
                " offloaded() opened its run in the middle of it: ask that for steps_done before"
            )
        if self._turn is not None:
            self._turn.loop = None
        return self._take(partial(self._coroutine.resume, reply))

    def hand_over(self, value: Any) -> Any:
        """Hand ``value`` over to the loop, and return its reply. Called by a micro-batch's thread."""
        if not self._is_inside_another:
            self._turn = present_turn()
        return self._coroutine.hand_over(value)

    def abandon(self) -> None:
        """Give up a step that has not ended, with the engine. The run is whole up to the step before."""
        if self._has_begun:
            if not self._coroutine.finished:
                self._engine.interrupt()
            self._coroutine.cancel()

    def _take(self, switch: Any) -> Any:
        try:
            event = switch()
        except BaseException:
            self.abandon()
            raise
        if self._turn is not None and not self._coroutine.finished:
            share(self._turn, self.abandon)
        return event
