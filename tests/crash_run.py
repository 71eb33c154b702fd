"""A training run to be killed: small, with everything in it that a resumed run must put back.

Dropout, clipping, two groups, a warm-up, and a loader that crosses from one epoch into the next. ``train`` is
what one process does; a ``Reference`` is the same run left alone, with every step kept for comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from fork_server import Kill, Outcome, kill_in_turn
from holdfast.data.corpus import Corpus
from holdfast.data.loader import step_loader
from holdfast.measure import drive_rates
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.engine import Engine
from holdfast.offload.runtime import Runtime
from holdfast.optim import MeZO
from holdfast.optim.mezo import PENDING, pending_of
from holdfast.store.format.manifest import Manifest
from holdfast.store.format.payload_files import VerifiedFiles
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, warm_up

STEPS = 10
CONTEXT = 16
TEXT = bytes(32 + (index * index) // 7 % 90 for index in range(500))
"""31 windows: the 8th step of 4 samples ends in the second epoch."""

MIXED = {"params_on_host": 0.5, "optimizer_on_host": 0.5, "activations_on_host": 0.5}
ON_SSD = {"params_on_host": 0.0, "optimizer_on_host": 0.0, "activations_on_host": 0.0}


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_bytes(TEXT)
    return path


def model(blocks: int = 4, frozen: bool = False) -> Decoder:
    """The same initial values every time, and the same random numbers after them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    config = DecoderConfig(
        blocks=blocks, width=16, heads=2, kv_heads=1, hidden=24, context=CONTEXT, dropout=0.1
    )
    made = Decoder(config)
    made.blocks[1].attention.query.weight.requires_grad_(not frozen)
    return made


def engine_of(
    root: str | Path,
    text: str | Path,
    *,
    blocks: int = 4,
    frozen: bool = False,
    mezo: bool = False,
    **options: Any,
) -> Engine:
    """The engine of the run, fresh or resumed, which has its ``loader``, and its model as ``trained``."""
    made = model(blocks, frozen)
    optimizer = MeZO(made.parameters(), lr=1e-3) if mezo else adamw(made)
    loader = step_loader(Corpus(str(text), context=CONTEXT), 2, 2, seed=3)
    options = {"dtype": "fp32", "clip_norm": 0.5, **MIXED, **options}
    if "drives" in options:  # as if they were different disks, which nobody measures
        drive_rates.rate_of, drive_rates.device_of = lambda directory, limits: 1e9, hash
    engine = holdfast.offload(
        made, optimizer, root, **grouped(scheduler=warm_up(optimizer), loader=loader, seed=5, **options)
    )
    engine.loader, engine.trained = loader, made  # type: ignore[attr-defined]
    return engine


def train(
    root: str | Path, text: str | Path, steps: int, *, nan_at: int | None = None, **options: Any
) -> list:
    """One process: start or resume, and go on to ``steps``. Returns the losses.

    The loss of step ``nan_at`` (counted from 0) is not a number, because its logits are none.
    """
    engine = engine_of(root, text, **options)
    return take_steps(engine, steps, nan_at)


def take_steps(engine: Engine, steps: int, nan_at: int | None = None) -> list:
    losses = []
    with engine:
        while engine.steps_done < steps:
            batches = next(engine.loader)  # type: ignore[attr-defined]
            random.random(), np.random.rand(), torch.rand(1)  # as a user's data pipeline would draw
            with spoiled(engine) if engine.steps_done == nan_at else nullcontext():
                losses.append(engine.step(batches))
    return losses


def spoiled(engine: Engine) -> AbstractContextManager[object]:
    """Inside, the logits of the model, and so its losses, are no numbers."""
    head = engine.trained.head  # type: ignore[attr-defined]
    return head.register_forward_hook(lambda head, args, logits: logits * math.nan)


@contextmanager
def acknowledging(acknowledge: Callable[[Runtime, int], None]) -> Iterator[None]:
    """Inside, ``acknowledge(runtime, step)`` is called the moment ``engine.durable_step`` says ``step``, by the
    thread that lets it say so."""

    def assign(run: Runtime, step: int) -> None:
        run.__dict__["durable_step"] = step
        if step >= 0:
            acknowledge(run, step)

    Runtime.durable_step = property(lambda run: run.__dict__["durable_step"], assign)  # type: ignore
    try:
        yield
    finally:
        Runtime.durable_step = -1


class Reference:
    """What each step of an uninterrupted run left: every atom's bytes, and the progress."""

    def __init__(self, reader: RunReader, losses: Sequence[float] = (), seconds: float = 0.0) -> None:
        self.steps = {ref.step: state_of(reader, reader.load(ref)) for ref in reader.commits()}
        self.losses, self.seconds = list(losses), seconds

    def check(self, reader: RunReader, manifest: Manifest) -> None:
        """``manifest`` has exactly the state of its step."""
        expected, found = self.steps[manifest.step], state_of(reader, manifest)
        odd = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
        assert not odd, f"step {manifest.step} differs from the uninterrupted run in {sorted(odd)[:5]}"

    def check_run(self, root: str | Path) -> list[int]:
        """Every commit that ``root`` lists is whole and has the state of its step. Returns their steps."""
        if not (Path(root) / "commits").exists():
            return []
        return self.check_all(LocalStore.read(root))

    def check_all(self, reader: RunReader) -> list[int]:
        """The same for whatever ``reader`` reads."""
        for ref in reader.commits():
            manifest = reader.load(ref)
            assert reader.verify(manifest) == []
            self.check(reader, manifest)
        return [ref.step for ref in reader.commits()]


def state_of(reader: RunReader, manifest: Manifest) -> dict[str, Any]:
    """Bytes of every atom by key, and the parts of the progress by name. Every block read is verified."""
    state: dict[str, Any] = {f"progress {key}": value for key, value in manifest.progress.items()}
    files = VerifiedFiles(reader.disk)
    for ref in manifest.files.values():
        state |= {entry.key: files.tensor(ref, entry.key).tobytes() for entry in files.layout(ref).entries}
    _catch_up(state, manifest)
    return state


def _catch_up(state: dict[str, Any], manifest: Manifest) -> None:
    """Of MeZO: apply what the files lack."""
    delta, groups = pending_of(manifest.progress)
    state.pop(f"progress {PENDING}", None)
    for name, group in groups.items():
        value, step = (
            torch.frombuffer(bytearray(state[f"{name}/{s}"]), dtype=torch.float32) for s in ("param", "step")
        )
        seed = torch.frombuffer(bytearray(state[f"{name}/seed"]), dtype=torch.int64)
        delta.apply(value, seed, step, group)
        state |= {f"{name}/param": value.numpy().tobytes(), f"{name}/step": step.numpy().tobytes()}


def atoms_of(reader: RunReader, manifest: Manifest) -> dict[str, bytes]:
    """The same atoms as any tool gets them, one by one through the index."""
    return {key: bytes(reader.read_atom(manifest, atom)) for key, atom in reader.atoms(manifest).items()}


def end(server: Any, reference: Reference, order: dict[str, Any], acknowledged: int) -> None:
    """Let a run that was killed go on to its end, and compare. ``acknowledged`` is the newest step that the killed
    process had seen."""
    reference.check_run(order["root"])
    outcome = server.run(**order, steps=STEPS)
    assert outcome.finished and not outcome.error and not outcome.warnings, outcome
    assert outcome.resumed >= acknowledged
    assert outcome.losses == reference.losses[outcome.resumed :]
    assert reference.check_run(order["root"])[0] == STEPS


def kill_and_end(
    server: Any,
    reference: Reference,
    folder: Path,
    kills: Sequence[Kill],
    order_of: Callable[[Path], dict[str, Any]],
) -> Path:
    """Kill processes of one run in turn, let the last one end, and compare.

    ``order_of`` says how each is made in a directory. Returns the directory of the run that ended.
    """

    def run(root: Path, **kill: Any) -> Outcome:
        outcome = server.run(root=root, steps=STEPS, **order_of(root), **kill)
        reference.check_run(root)
        return outcome

    def check_end(root: Path, outcome: Outcome) -> None:
        assert reference.check_run(root)[0] == STEPS

    root, acknowledged = kill_in_turn(run, folder, kills, check_end)
    end(server, reference, {"root": root, **order_of(root)}, acknowledged)
    return root
