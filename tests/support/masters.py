"""Engines that store masters whole, beside a compute copy, as in fp32 or with several ranks."""

from __future__ import annotations

from importlib import import_module

import pytest

PARTS = import_module("holdfast.offload.model.model_parts")
USUAL = PARTS.BlockState


def build_with(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    """Have engines built with ``whole`` masters, or as usual."""

    def of_whole_masters(*args, may_split=False, **options):
        return USUAL(*args, **options)

    monkeypatch.setattr(PARTS, "BlockState", of_whole_masters if whole else USUAL)
