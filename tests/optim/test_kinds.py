"""Kinds of optimizers, and the names by which runs know their classes."""

import torch

from holdfast.optim import AdamW8bit, kinds


def test_classes_of_this_library_are_stored_by_a_name_that_stays():
    """Runs of earlier versions name them by modules that were moved since."""
    for cls in kinds.FORMED:
        assert kinds.name_of_class(cls) == f"holdfast.optim.{cls.__name__}"
        assert kinds.class_named(kinds.name_of_class(cls)) is cls
    assert kinds.class_named("holdfast.update.adamw.AdamW8bit") is AdamW8bit
    assert kinds.class_named("mine.AdamW8bit") is None
    assert kinds.class_named(kinds.name_of_class(torch.optim.AdamW)) is torch.optim.AdamW
