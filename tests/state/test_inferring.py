"""The rules that are inferred of a cut make the same cut again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.formats.rules_source import HeldRegion, inferred
from holdfast.state.layout.regions import Region
from holdfast.state.rules.assembly import assemble
from holdfast.state.rules.rule_language import Rules
from holdfast.state.rules.rule_matching import StoredTensor
from holdfast.state.tensor_entries import TensorEntry

NAMES = ("layers.0.w", "layers.1.w", "layers.10.b", "it's.3", "a+b.w", "norm")


@st.composite
def cut(draw, world):
    """A shape, and the boxes that ranks have of it: all by one, spans along a dim, or a grid."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    ranks = draw(st.permutations(range(world)))
    kind = draw(st.sampled_from(["whole", "spans", "grid"])) if shape else "whole"
    if kind == "whole":
        return shape, [HeldRegion(ranks[0], Region.whole(shape))]
    dims = [0] if kind == "spans" else list(range(len(shape)))
    boxes = [Region.whole(shape)]
    for dim in dims:
        at = draw(st.integers(0, shape[dim]))
        boxes = [half for box in boxes for half in halves(box, dim, at)]
    boxes = boxes[:1] if len(boxes) > world else boxes
    if len(boxes) == 1:
        return shape, [HeldRegion(ranks[0], Region.whole(shape))]
    order = sorted(ranks[: len(boxes)]) if draw(st.booleans()) else ranks
    return shape, [HeldRegion(rank, box) for rank, box in zip(order, boxes)]


def halves(box, dim, at):
    low, high = list(box.stop), list(box.start)
    low[dim] = high[dim] = at
    return Region(box.start, tuple(low)), Region(tuple(high), box.stop)


@st.composite
def state(draw):
    world = draw(st.integers(1, 5))
    keys = draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["param", "exp_avg", "a|b"])), unique=True)
    )
    atoms = []
    for name, slot in keys:
        shape, held = draw(cut(world))
        atoms.append((TensorEntry(name, slot, shape, "F32"), held))
    return world, atoms


@pytest.mark.slow
@settings(deadline=None)
@given(state())
def test_rules_inferred_of_a_cut_make_it_again(case):
    world, atoms = case
    rows, recorded = [], {}
    for atom, held in atoms:
        recorded[atom.key] = atom, {}
        for rank, box in held:
            recorded[atom.key][1][len(rows)] = box
            rows.append(
                StoredTensor(len(rows), atom.name, box.shape, "F32", atom.slot, {"rank": (rank, world)})
            )
    text = inferred(atoms, world)
    if not atoms:
        return
    made = assemble(Rules.parse(text), rows)
    assert not made.unused and not made.ambiguous and not made.aliases
    assert {key: ruled.atom for key, ruled in made.atoms.items()} == {
        k: atom for k, (atom, _) in recorded.items()
    }
    for key, (_, boxes) in recorded.items():
        found = {piece.part: piece.box for piece in made.atoms[key].pieces if piece.box.elements}
        assert found == {part: box for part, box in boxes.items() if box.elements}


def test_layers_that_are_cut_alike_share_a_rule_and_their_steps_need_none():
    atoms = []
    for n in range(3):
        halves = [HeldRegion(rank, Region((2 * rank, 0), (2 * rank + 2, 3))) for rank in range(2)]
        for slot in ("param", "exp_avg"):
            atoms.append((TensorEntry(f"h.{n}.w", slot, (4, 3), "F32"), halves))
        atoms.append((TensorEntry(f"h.{n}.w", "step", (), "F32"), [HeldRegion(n % 2, Region((), ()))]))
    text = inferred(atoms, 2)
    assert text.count("[[rule]]") == 1
    assert "# 3 tensors: h.0.w [4, 3], to h.2.w\n" in text
    assert "widths = [2, 2]\n" in text
