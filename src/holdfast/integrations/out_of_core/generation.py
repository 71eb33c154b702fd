"""Texts that a trainer generates for the steps of a policy, as GRPO and RLOO of TRL do.

Their class generates in the middle of a micro-batch, at the first one that needs new texts. The engine computes the
micro-batches of a step together, so all texts of a step are made before it, with the same weights. Each call of the
model is a pass of the engine then, so a token of the texts that are generated together takes one pass over the blocks.
Several processes make the same passes: one whose texts are complete goes on until those of all are. Names are those of
TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer

from ...errors import BadInput
from ...state.encoding import decode, encode
from ...state.progress import random_state, restore_random_state

USED = "_prepare_inputs", "_step", "_buffered_inputs", "num_iterations"
"""The attributes and methods that this module uses of a trainer that generates."""
UNEQUAL_PASSES = {
    "tools": "tools",
    "environment_factories": "environment_factory",
    "rollout_func": "rollout_func",
}
"""Attributes of a trainer that let a process generate as often as its own texts ask for, and their arguments."""


def generates(trainer_class: type[Trainer]) -> bool:
    """Return whether the class generates the texts that it trains on."""
    return hasattr(trainer_class, "_generate_and_score_completions")


def refuse_generation(trainer: Any) -> None:
    """Raise ``BadInput`` if texts would be of other weights than those of the step that they are for.

    Nothing is refused of a trainer that does not generate.
    """
    if not generates(type(trainer)):
        return
    name = type(trainer).__bases__[-1].__name__
    if absent := [each for each in USED if not hasattr(trainer, each)]:
        raise BadInput(
            f"{name} generates texts in a way that offloaded() does not know (it has no {absent[0]}): train it in"
            " memory, with HoldfastCallback"
        )
    args = trainer.args
    every, accumulation = args.steps_per_generation * trainer.num_iterations, args.gradient_accumulation_steps
    if accumulation % every:
        raise BadInput(
            f"steps_per_generation times num_iterations is {every}, and a step has {accumulation} micro-batches: texts"
            " are generated for each step anew. Give num_iterations=1, and leave out steps_per_generation and"
            " generation_batch_size."
        )
    given = [argument for name, argument in UNEQUAL_PASSES.items() if getattr(trainer, name, None)]
    if args.world_size > 1 and given:
        raise BadInput(
            f"with {given[0]} each process generates as often as its own texts ask for, and the {args.world_size}"
            " processes here have to make the same passes: start the script by itself"
        )
    if "ref" in getattr(trainer.model, "peft_config", ()):
        raise BadInput(
            "the reference is the adapter 'ref' of the model, which the engine does not switch to: merge the adapter"
            " into the model and begin a new one, or give beta=0"
        )


class EqualPasses:
    """Makes ``model.generate`` do as many passes in each process as in all others, until ``remove``.

    transformers goes on, without using the results, until the texts of all processes are complete.
    """

    def __init__(self, model: Any) -> None:
        self._attributes, self._generate = vars(model), model.generate
        self._before = self._attributes.get("generate")
        """The function that the script had put in the place of the class's method; None if it had not."""
        self._attributes["generate"] = self._generate_equally

    def remove(self) -> None:
        """Give the model its own ``generate`` back."""
        if self._before is None:
            self._attributes.pop("generate", None)
        else:
            self._attributes["generate"] = self._before

    def _generate_equally(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(*args, **kwargs | {"synced_gpus": True})


def begin(trainer: Any) -> None:
    """Forget what an earlier call of ``train`` left, which failed in its first step."""
    if generates(type(trainer)):
        trainer._step, trainer._buffered_inputs = 0, None
        for metrics in trainer._metrics.values():
            metrics.clear()


def prepared(trainer: Any, batches: Sequence[Any], prepare: Any) -> list[Any]:
    """Return the inputs of each micro-batch of a step, with the texts that are generated for it.

    Args:
        trainer: The trainer, which counts micro-batches in ``_step``.
        batches: What its loader has returned for each.
        prepare: The ``_prepare_inputs`` of the trainer's own class.
    """
    first, made = trainer._step, []
    try:
        for m, batch in enumerate(batches):
            trainer._step = first + m
            made.append(prepare(batch))
    finally:
        trainer._step = first
    if (first + len(batches)) % (trainer.args.steps_per_generation * trainer.num_iterations) == 0:
        trainer._buffered_inputs = None  # used up, and would be in every commit
    return made


def changed(trainer: Any) -> dict[str, Any]:
    """Return, as JSON, what the generation of a step's texts has changed beside attributes of the trainer."""
    return {"random": encode(random_state()), "num_input_tokens_seen": trainer.state.num_input_tokens_seen}


def restore(trainer: Any, found: dict[str, Any]) -> None:
    """Set what ``changed`` returned in an earlier process, where texts are not generated again."""
    restore_random_state(decode(found["random"]))
    trainer.state.num_input_tokens_seen = found["num_input_tokens_seen"]
