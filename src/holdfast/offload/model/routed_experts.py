"""The frozen experts of a model's blocks that are read one by one, where a token is routed to them.

They are parameters whose first dim counts the experts of the module that holds them (``num_experts``), as in the
mixtures of transformers. Their code has to take one expert at a time. Called by ``ModelParts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...errors import BadInput, ModelNotSupported
from ..memory.parameter_shards import memory_order
from .blocks import Blocks, Owned

ONE_BY_ONE = "eager"
"""The implementation in transformers that takes one expert at a time; the others take the whole parameter."""


def routed_parameters(blocks: Blocks, by_block: Sequence[Sequence[Owned]]) -> list[set[str]]:
    """Return for each streamed unit the names of the parameters whose experts are read one by one.

    Raises ``BadInput`` if there are none, ``ModelNotSupported`` if their code would take all experts at once.
    """
    repeated = range(blocks.embeddings, len(blocks.modules))
    found = [
        [one for one in owned if number in repeated and _is_routed(one)]
        for number, owned in enumerate(by_block)
    ]
    if not any(found):
        raise BadInput(
            "expert_slots is of frozen experts, and no block has any: parameters of three dims, of which the first"
            " counts the experts of their module (num_experts). Experts that are trained come with their block. Leave"
            " it out."
        )
    for owned in found:
        modules = {id(one.places[0][0]): one for one in owned}
        for one in modules.values():
            _refuse_whole(one)
        if len(modules) > 1:
            first, second, *_ = modules.values()
            raise ModelNotSupported(
                f"{first.captured.name} and {second.captured.name} are of two mixtures in one block, and expert_slots"
                " takes one. Leave it out."
            )
    return [{one.captured.name for one in owned} for owned in found]


def _is_routed(owned: Owned) -> bool:
    """Return whether a parameter is of the frozen experts of one module, which has a matrix of each of them."""
    module, _ = owned.places[0]
    if owned.captured.trained or owned.captured.as_stored or len(owned.places) > 1:
        return False
    counted = [p for p in module._parameters.values() if p is not None and p.dim() > 1 and _counts(module, p)]
    is_one = any(each is owned.captured.parameter for each in counted) and any(p.dim() == 3 for p in counted)
    return is_one and memory_order(owned.captured.parameter) is None


def _counts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether the first dim of a parameter counts the experts of its module."""
    return parameter.shape[0] == getattr(module, "num_experts", None)


def _refuse_whole(owned: Owned) -> None:
    """Raise ``ModelNotSupported`` if the code of a module of transformers takes the whole parameter."""
    config = getattr(owned.places[0][0], "config", None)
    how = getattr(config, "_experts_implementation", None)
    if how not in (None, ONE_BY_ONE):
        raise ModelNotSupported(
            f"expert_slots: {owned.captured.name} is computed with by experts_implementation={how!r}, which takes all"
            f" experts at once. Call model.set_experts_implementation({ONE_BY_ONE!r}) before offload(), which takes one"
            " after another, with other last bits; or leave expert_slots out."
        )
