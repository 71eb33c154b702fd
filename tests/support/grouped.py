"""Options of ``holdfast.offload`` by one name each, for tests that vary them one by one."""

from __future__ import annotations

from typing import Any

import holdfast

GROUPS = {
    "precision": (holdfast.Precision, {"dtype": "dtype", "loss_scale": "loss_scale"}),
    "clipping": (holdfast.Clipping, {"clip_norm": "norm", "clipping": "mode"}),
    "durability": (holdfast.Durability, {"commit_every": "commit_every", "retain": "retain"}),
    "placement": (
        holdfast.Placement,
        {
            name: name
            for name in (
                *("params_on_host", "optimizer_on_host", "activations_on_host"),
                *("delayed_fraction", "recomputed_fraction", "embedding_and_head", "expert_slots"),
            )
        },
    ),
    "io": (
        holdfast.IO,
        {
            "io_threads": "threads",
            **{
                name: name
                for name in ("drives", "direct", "read_limit", "write_limit", "total_limit", "update_workers")
            },
        },
    ),
}
"""By argument of ``offload``: its class, and the fields by the names that tests use."""


def grouped(**options: Any) -> dict[str, Any]:
    """Return the arguments of ``offload`` with ``options`` in the objects to which they belong.

    >>> grouped(dtype="fp32", seed=1)
    {'seed': 1, 'precision': Precision(dtype='fp32', loss_scale=None)}
    """
    found: dict[str, Any] = {}
    for argument, (kind, names) in GROUPS.items():
        given = {names[name]: options.pop(name) for name in [*options] if name in names}
        if given:
            found[argument] = kind(**given)
    return {**options, **found}
