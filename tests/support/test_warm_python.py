"""What a fork of the warm process leaves behind in the process of the tests."""

from __future__ import annotations

import gc
import subprocess
import warnings

import pytest

from support.warm_python import environment_of, run_python


def test_a_timeout_closes_the_pipes(tmp_path):
    """An open one would warn in another test, when it is collected."""
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    gc.collect()  # what earlier tests left open is not meant
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(subprocess.TimeoutExpired):
            run_python(script, env=environment_of(), timeout=0.1)
        gc.collect()
    assert [each for each in caught if each.category is ResourceWarning] == []
