"""What docstrings of the benchmarks show is so."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["common", "failures", "jobs", "plot", "recovery"])
def test_examples_in_docstrings_are_so(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed
