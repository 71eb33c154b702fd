"""The engine: an interpreter of operation lists that holds one model's training run.

``step`` turns micro-batches into a ``Step``, has the executor run the schedule's operations on it, and says
what happened. It returns when the last computation is over: updates, writes and the commit of a step go on
beside the next one, which waits for exactly what it needs. After an error the engine is closed, its threads
are gone, the model is left unpatched, and the run resumes from its newest commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import mul
from typing import Any

import torch

from ..errors import BadInput, EngineFailed
from ..events import EventLog
from ..plan.horizontal import horizontal
from ..plan.ops import Op
from ..plan.vertical import commit_only, forward_only, vertical
from ..plan.work import StepShape, Work
from ..state.capture import buffer_at
from ..state.progress import encode, random_state
from . import rng
from .blocks import install
from .executor import Executor
from .interrupts import deferred
from .microbatches import Coroutine, all_cancelled, extract_loss, module_call
from .ops import handlers
from .preflight import Preflight
from .process import one_torch_thread, process_bytes
from .runtime import MicroBatch, Runtime, Step
from .setup import Parts, frozen_name
from .units import as_tensor

SCHEDULES = {"vertical": vertical, "horizontal": horizontal}
EVALUATION_BATCHES = 8
"""Micro-batches that an evaluation takes through the blocks together."""


class Engine:
    """A model whose training state lives outside the device. Made by ``holdfast.offload``."""

    def __init__(
        self,
        run: Runtime,
        parts: Parts,
        work: Work,
        preflight: Preflight,
        *,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loader: Any,
        schedule: str,
        clip_norm: float | None,
        commit_every: int,
        normalize: str,
        update_workers: int,
        events: EventLog,
        were_real: dict[str, bool],
    ) -> None:
        self._run, self._parts, self._work = run, parts, work
        self.preflight = preflight
        self._optimizer, self.scheduler, self._loader = optimizer, scheduler, loader
        self._schedule, self._clip_norm = schedule, clip_norm
        self._commit_every, self._normalize = commit_every, normalize
        self._events, self._were_real = events, were_real
        self._index = run.store.put_index(parts.index())
        self._executor = Executor(handlers(run), update_workers, one_torch_thread)
        torch.set_num_threads(torch.get_num_threads())  # what threads that come later start with
        self._lists: dict[Any, list[Op]] = {}
        self._closed = False
        self.steps_done = 0
        """Optimizer steps done, skipped ones included."""
        self.durable_step = -1
        """The newest step that survives power loss; -1 before the first commit."""
        self.resumed_from: int | None = None
        self.skipped_steps = 0
        self._positions: dict[str, Any] = {}  # since the last step a batch may have been fetched
        self.last: dict[str, Any] = {}
        """The event of the last step."""

    # What a user calls

    def step(self, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None = None) -> float:
        """One optimizer step over ``micro_batches``: keyword dicts for the model, or tuples with ``loss_fn``.

        Returns the mean loss. The step is durable when ``durable_step`` has reached ``steps_done``; at most
        one step is on its way. A loss that is not finite skips the update, and ``last["skipped"]`` says so.
        """
        self._check_usable()
        if not micro_batches:
            raise BadInput("a step needs at least one micro-batch")
        if not torch.is_grad_enabled():
            raise BadInput(
                "a step needs gradients: call engine.step outside torch.no_grad() and inference_mode()"
            )
        weights = self._weights(micro_batches)
        with self._closing_on_error():
            started, moved = time.perf_counter(), self._counters()
            shape = StepShape(
                micro_batches=len(micro_batches),
                clip=self._clip_norm is not None,
                commit=self._commit_every > 0 and (self.steps_done + 1) % self._commit_every == 0,
            )
            step = self._training_step(micro_batches, weights, loss_fn, shape)
            with self._running(step):
                step.resident_grads = self._run.residency.start_resident_grads()
                self._executor.run(self._operations(self._schedule, shape), step)
            self.steps_done += 1
            self.skipped_steps += step.skipped
            return self._report(step, micro_batches, time.perf_counter() - started, moved)

    def evaluate(self, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None = None) -> float:
        """The mean loss over ``micro_batches``, with the weights of the last step and nothing recorded."""
        if not micro_batches:
            raise BadInput("an evaluation needs at least one micro-batch")
        calls = [module_call(self._run.model, self._run.device.take_batch(b), loss_fn) for b in micro_batches]
        losses = self._forward([lambda call=call: float(extract_loss(call())) for call in calls])
        return sum(losses) / len(losses)

    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        context: int | None = None,
    ) -> torch.Tensor:
        """``tokens`` (int64, shape (1, T)) continued by ``max_new_tokens`` sampled ones. Every token takes a
        pass over all blocks, of the last ``context`` tokens. A temperature of 0 takes the likeliest."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(max_new_tokens):
            window = tokens if context is None else tokens[:, -context:]
            (value,) = self._forward(
                [module_call(self._run.model, (window.to(self._run.device.torch_device),), None)]
            )
            logits = value if isinstance(value, torch.Tensor) else value.logits
            tokens = torch.cat(
                [tokens, _sample(logits[:, -1].float().cpu(), temperature, top_k, generator)], dim=1
            )
        return tokens

    def save(self) -> None:
        """Make the present state a commit. It is durable when this returns."""
        self._check_usable()
        if self.durable_step == self.steps_done:
            return
        self.wait()
        if self.durable_step < self.steps_done:
            step = self._blank_step(StepShape(micro_batches=1), training=True)
            step.number = self.steps_done - 1
            step.progress = self._progress() | self._positions
            with self._closing_on_error(), self._running(step):
                self._executor.run(commit_only(self._work, self._run.placement), step)
                self._executor.drain()

    def wait(self) -> None:
        """Wait until everything under way is over: updates done, and the commit, where one was due, durable."""
        self._check_usable()
        with self._closing_on_error():
            self._executor.drain()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter in fp32 and every persistent buffer, by the model's names, in host memory."""
        self.wait()
        values: dict[str, torch.Tensor] = {}
        for index, unit in enumerate(self._parts.all_units):
            values.update(self._values(index, unit))
        ordered = {name: values[p.name] for p in self._parts.captured.parameters for name in p.names}
        return ordered | {
            name: buffer_at(place).detach().clone() for name, place in self._parts.captured.buffers.items()
        }

    def close(self) -> None:
        """Finish and commit what is under way, give the model back, and let go of the run directory.

        Parameters that were real when the model was handed over get their trained values; those that were on
        ``meta`` stay there. A second call does nothing.
        """
        if self._closed:
            return
        with self._closing_on_error():
            self._executor.drain()
            if self._commit_every:
                self.save()
            restored = self.state_dict() if any(self._were_real.values()) else {}
        self._shut_down()
        for parameter in self._parts.captured.parameters:
            if self._were_real[parameter.name]:
                value = restored[parameter.name].to(parameter.parameter.dtype)
                real = torch.nn.Parameter(value, requires_grad=parameter.parameter.requires_grad)
                torch.utils.swap_tensors(parameter.parameter, real)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            if issubclass(kind, Exception):  # the script's own: the step that was computed is still committed
                with suppress(Exception):
                    self._executor.drain()
            self.give_up()

    def give_up(self) -> None:
        """Stop without a further commit: what is under way ends, nothing else is written. The run stays whole."""
        self._executor.abort()
        self._shut_down()

    # Observation

    @property
    def operations(self) -> dict[Any, list[Op]]:
        """The operation lists made so far, by schedule and shape."""
        return self._lists

    def traffic(self) -> dict[tuple[str, str], int]:
        """Bytes moved since the engine was built, by (lane, kind of operation)."""
        return dict(self._counters())

    def trace(self, spans: list | None) -> None:
        """Record in ``spans`` when every operation runs, or stop recording (None)."""
        self._executor.spans = spans

    # Steps

    def _weights(self, micro_batches: Sequence[Any]) -> list[float | None]:
        """What each loss is multiplied by; None for a plain mean."""
        if self._normalize == "tokens":
            return _token_weights(micro_batches)
        return [None] * len(micro_batches)

    def _training_step(
        self, micro_batches: Sequence[Any], weights: list[float | None], loss_fn: Any, shape: StepShape
    ) -> Step:
        """Hyper-parameters and progress are taken now: the scheduler belongs to the next step from here on."""
        step = self._blank_step(shape, training=True)
        step.hyper = self._run.optimizer.snapshot()
        step.clip_norm = self._clip_norm
        step.micro_batches = [
            MicroBatch(
                Coroutine(module_call(self._run.model, self._run.device.take_batch(batch), loss_fn)), weight
            )
            for batch, weight in zip(micro_batches, weights, strict=True)
        ]
        if self.scheduler is not None:
            self.scheduler.step()
        step.progress = self._progress()
        self._positions = {key: step.progress[key] for key in ("random", "loader") if key in step.progress}
        return step

    def _blank_step(self, shape: StepShape, training: bool) -> Step:
        return Step(
            number=self.steps_done,
            shape=shape,
            training=training,
            horizontal=training and self._schedule == "horizontal",
            micro_batches=[],
        )

    def _forward(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """What the model returns for each call, in evaluation mode and without gradients."""
        self._check_usable()
        model, results = self._run.model, []
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            for start in range(0, len(calls), EVALUATION_BATCHES):
                group = calls[start : start + EVALUATION_BATCHES]
                shape = StepShape(micro_batches=len(group))
                step = self._blank_step(shape, training=False)
                step.micro_batches = [MicroBatch(Coroutine(call), None) for call in group]
                with self._only_losing(step), torch.no_grad(), self._running(step):
                    self._executor.run(self._operations("evaluate", shape), step)
                results += [batch.result for batch in step.micro_batches]
        finally:
            for module, mode in modes:
                module.training = mode
        return results

    def _operations(self, schedule: str, shape: StepShape) -> list[Op]:
        """The operation list for one shape of step, made once."""
        found = self._lists.get((schedule, shape))
        if found is None:
            make = SCHEDULES.get(schedule, forward_only)
            found = self._lists[schedule, shape] = make(self._work, self._run.placement, shape)
        return found

    @contextmanager
    def _running(self, step: Step) -> Iterator[None]:
        """The model is patched, the generators are kept, and no thread of the step outlives it."""
        grad = torch.is_grad_enabled()
        device = self._run.device.torch_device
        with deferred() as safe_point, rng.preserved_generators(device):
            self._executor.safe_point = safe_point
            self._run.patch.apply()
            try:
                with all_cancelled([batch.coroutine for batch in step.micro_batches]):
                    yield
            finally:
                self._run.patch.remove()
                torch.set_grad_enabled(grad)  # a key press may have left it otherwise

    @contextmanager
    def _only_losing(self, evaluation: Step) -> Iterator[None]:
        """An error of the model in an evaluation ends the evaluation; any other closes the engine."""
        with self._closing_on_error():
            try:
                yield
                return
            except Exception as error:
                self._executor.go_on()  # raises what failed, unless it was a computation
                self._run.residency.drop_pass("evaluate")
                failed = error
        raise failed

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def _shut_down(self) -> None:
        """Stop everything and unpatch the model. Nothing more is written."""
        if self._closed:
            return
        self._closed = True
        self._executor.close()
        for unit in self._parts.all_units:
            for member in unit.members:
                install(member.owned, member.owned.captured.parameter)
        self._run.store.queue.close()  # nothing is under way any more when files are closed
        self._run.store.close()
        self._run.resident_leaves.clear()  # their hooks refer to the runtime, in a circle that no one collects
        self._run.residency.let_go()
        self._events.emit("closed", step=self.steps_done, durable_step=self.durable_step)

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineFailed(
                f"this engine is closed; its run is whole up to step {self.durable_step}. Build a new one with "
                "holdfast.offload to resume."
            )

    # Commits

    def publish(self, step: Step) -> None:
        """Called on the commit lane when all files of ``step`` are written and synced."""
        run = self._run
        files = {name: (stored.generation, stored.checksums) for name, stored in run.newest.items()}
        for unit in self._parts.all_units:
            if unit.name in run.frozen:
                stored = run.frozen[unit.name]
                files[frozen_name(unit)] = (stored.generation, stored.checksums)
        progress = step.progress  # taken when the step began: whether it would be skipped was not known
        progress["skipped_steps"] += step.skipped
        run.store.publish(step.number + 1, files, self._index, progress)
        self.durable_step = step.number + 1

    def publish_first(self) -> None:
        """The base of a fresh run: step 0, durable before training begins."""
        step = self._blank_step(StepShape(micro_batches=1), training=True)
        step.number, step.progress = -1, self._progress()
        self.publish(step)

    def _progress(self) -> dict[str, Any]:
        """What resuming needs besides tensors, as it is when the step under way is over."""
        progress = progress_of(self._optimizer, self.scheduler, self._loader)
        return {**progress, "skipped_steps": self.skipped_steps}

    # Reports

    def _report(self, step: Step, micro_batches: Sequence[Any], seconds: float, before: dict) -> float:
        losses = [batch.loss or 0.0 for batch in step.micro_batches]
        weights = [batch.weight for batch in step.micro_batches if batch.weight is not None]
        loss = sum(map(mul, losses, weights)) if weights else sum(losses) / len(losses)
        moved = {key: count - before.get(key, 0) for key, count in self._counters().items()}
        self.last = {
            "step": self.steps_done,
            "loss": loss,
            "grad_norm": step.total_norm,
            "seconds": seconds,
            "tokens": sum(map(_count_tokens, micro_batches)),
            "learning_rate": [group["lr"] for group in step.hyper.groups] if step.hyper else [],
            "durable_step": self.durable_step,
            "read_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_read"),
            "written_bytes": sum(n for (lane, _), n in moved.items() if lane == "ssd_write"),
            "host_bytes": process_bytes(),
            "skipped": step.reason if step.skipped else None,
        }
        self._events.emit("step", **self.last)
        return loss

    def _counters(self) -> dict[tuple[str, str], int]:
        moved = dict(self._run.moved)
        for (direction, kind, _), count in self._run.store.queue.counters().items():
            key = (f"ssd_{direction}", kind)
            moved[key] = moved.get(key, 0) + count
        return moved

    def _values(self, index: int, unit: Any) -> dict[str, torch.Tensor]:
        """The master parameters of one unit."""
        store = self._run
        is_resident = index == len(self._parts.units)
        if is_resident:
            image = as_tensor(store.resident_buffer)
            return {
                m.name: unit.state_view(image, m.name, "param").clone() for m in unit.trained
            } | self._frozen(unit)
        buffer = store.residency.images.get(index)
        taken = None
        if buffer is None:
            buffer = taken = store.residency.pool.take(unit.layout.file_bytes, "optimizer state")
            newest = store.newest[unit.name]
            store.block_units[index].read(
                newest.generation, buffer.view, newest.checksums, kind="state", phase="export", priority=0
            ).result()
        values = {m.name: unit.state_view(as_tensor(buffer), m.name, "param").clone() for m in unit.trained}
        if taken is not None:
            store.residency.pool.give(taken)
        return values | self._frozen(unit)

    def _frozen(self, unit: Any) -> dict[str, torch.Tensor]:
        if not unit.frozen:
            return {}
        buffer = self._run.residency.pool.take(unit.frozen_layout.file_bytes, "frozen parameters")
        stored = self._run.frozen[unit.name]
        self._run.frozen_units[unit.name].read(
            stored.generation, buffer.view, stored.checksums, kind="state", phase="export", priority=0
        ).result()
        values = {m.name: unit.frozen_view(as_tensor(buffer), m.name).clone() for m in unit.frozen}
        self._run.residency.pool.give(buffer)
        return values


def progress_of(optimizer: torch.optim.Optimizer, scheduler: Any, loader: Any) -> dict[str, Any]:
    """Random generators, hyper-parameters, schedule and data position, as JSON. Raises ``BadInput`` naming
    the first thing that cannot be stored by value."""
    groups = [
        {k: encode(v, f"param_groups[{i}][{k!r}]") for k, v in group.items() if k != "params"}
        for i, group in enumerate(optimizer.param_groups)
    ]
    progress = {"random": encode(random_state()), "optimizer": type(optimizer).__name__, "groups": groups}
    if scheduler is not None:
        progress["scheduler"] = encode(scheduler.state_dict(), "scheduler")
    if loader is not None:
        progress["loader"] = encode(loader.state_dict(), "loader")
    return progress


def _token_weights(micro_batches: Sequence[Any]) -> list[float | None]:
    """Each micro-batch's share of the target tokens of the step."""
    counts = []
    for batch in micro_batches:
        labels = next(
            (batch[k] for k in ("labels", "targets") if isinstance(batch, dict) and k in batch), None
        )
        if labels is None:
            raise BadInput('normalize="tokens" needs "labels" or "targets" in every micro-batch')
        shifted = labels[..., 1:] if "labels" in batch else labels
        counts.append(int((shifted != -100).sum()))
    return [count / max(sum(counts), 1) for count in counts]


def _count_tokens(batch: Any) -> int:
    """Elements of a micro-batch's first integer tensor."""
    values = batch.values() if isinstance(batch, dict) else batch
    return next((v.numel() for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point()), 0)


def _sample(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
