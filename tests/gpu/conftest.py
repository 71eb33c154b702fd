"""Before the first call of cuBLAS, which asks once: without a workspace of its own it gives other bits every time."""

import os

from cli.conftest import holdfast  # noqa: F401

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
