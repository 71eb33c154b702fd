"""Export: the trained values out of core, as a ``state_dict`` holds them."""

from __future__ import annotations

import torch

from ..io.buffers import Buffer
from ..state.capture import Captured, buffer_at, join, plain_paths
from ..store.local import LocalStore
from .runtime import Runtime
from .units import as_tensor


def state_dict(run: Runtime, captured: Captured) -> dict[str, torch.Tensor]:
    """Every parameter in fp32 and every persistent buffer, by the model's names, in host memory. Nothing may
    be under way."""
    values: dict[str, torch.Tensor] = {}
    for block in range(len(run.units)):
        values.update(_trained(run, block))
        values.update(_frozen(run, block))
    ordered = {name: values[p.name] for p in captured.parameters for name in p.names}
    plain, held = plain_paths(run.model), {(id(module), key) for module, key in captured.buffers.values()}
    buffers = {
        join(plain[path], key): buffer_at((module, key)).detach().clone()
        for path, module in run.model.named_modules(
            remove_duplicate=False
        )  # also by the other names of a module
        for key in module._buffers
        if (id(module), key) in held
    }
    return ordered | buffers


def trained_values(run: Runtime, captured: Captured) -> dict[str, torch.Tensor]:
    """Every trained parameter in fp32, by the model's names. Nothing may be under way."""
    values: dict[str, torch.Tensor] = {}
    for block, unit in enumerate(run.units):
        if unit.trained:
            values.update(_trained(run, block))
    return {name: values[p.name] for p in captured.parameters if p.trained for name in p.names}


def newest_values(run: Runtime, names: set[str]) -> dict[str, torch.Tensor]:
    """Those of the parameters of a run's newest whole commit that ``names`` has."""
    with LocalStore.read(run.store.root, disk=run.store.disk, direct=run.store.direct) as reader:
        manifest, _ = reader.newest_whole()
        atoms = {a["name"]: a for a in reader.atoms(manifest).values() if a["slot"] == "param"}
        return {
            name: torch.frombuffer(reader.read_atom(manifest, atoms[name]), dtype=torch.float32).view(
                atoms[name]["shape"]
            )
            for name in names
        }


def _trained(run: Runtime, block: int) -> dict[str, torch.Tensor]:
    """Master parameters of a unit, from memory if its state stays there."""
    unit = run.units[block]
    kept = run.resident_buffer if unit is run.resident else run.residency.images.get(block)
    image = kept or _read(run, unit.name)
    values = {m.name: unit.state_view(as_tensor(image), m.name, "param").clone() for m in unit.trained}
    if kept is None:
        run.residency.pool.give(image)
    return values


def _frozen(run: Runtime, block: int) -> dict[str, torch.Tensor]:
    unit = run.units[block]
    if not unit.frozen:
        return {}
    image = _read(run, unit.frozen_name)
    values = {m.name: unit.frozen_view(as_tensor(image), m.name).clone() for m in unit.frozen}
    run.residency.pool.give(image)
    return values


def _read(run: Runtime, name: str) -> Buffer:
    """A file's newest generation, every byte verified."""
    files, newest = run.stored[name], run.newest[name]
    buffer = run.residency.pool.take(files.layout.file_bytes, "export")
    files.read(
        newest.generation, buffer.view, newest.checksums, kind="state", phase="export", priority=0
    ).result()
    return buffer
