"""The guard of an engine's steps: the model is patched, no thread outlives its step, and an error closes the engine.

An error of the model in an evaluation ends only that evaluation. After any other error the engine is closed: its
threads have ended, the model is unpatched, nothing more is written, and the run can be resumed from its newest commit.
Of several ranks all make the same calls. What one of them is refused, all are, and their engines stay usable; after any
other error none is. Called by ``Engine``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..errors import BadInput, EngineFailed
from ..schedule.operations import TIED
from . import rng
from .executor import Executor
from .exit_hook import deferred
from .model.chunked_head import ChunkedHead, has_ordinary_loss
from .model.microbatches import all_cancelled, checked_batches
from .runtime import Runtime, Step
from .setup.model_values import HeldModel
from .step_reports import StepReports


class EngineGuard:
    """Patches the model for each step, and closes the engine after an error."""

    def __init__(
        self,
        run: Runtime,
        held: HeldModel,
        executor: Executor,
        reports: StepReports,
        on_close: Callable[[], object],
    ) -> None:
        """Guard an engine of these parts. ``on_close`` is called when it is closed, first of all."""
        self._run, self._held, self._executor, self._reports = run, held, executor, reports
        self._on_close = on_close
        self._head = ChunkedHead(run.model) if has_ordinary_loss(run.model) else None
        self.is_closed = False
        self.uncommitted_step: Step | None = None
        """The newest step, while its commit waits for the state of a loop."""

    @contextmanager
    def running(self, step: Step, takes_loss: bool = False) -> Iterator[None]:
        """Patch the model and keep the random generators while ``step`` runs; no thread of the step outlives this
        context.

        If it ``takes_loss`` of the model and nothing else, the loss is computed in chunks of tokens.
        """
        grad = torch.is_grad_enabled()
        device = self._run.device.torch_device
        with deferred() as safe_point, rng.own_generators(device, safe_point):
            self._executor.safe_point = safe_point
            self._run.device.begins()
            self._held.in_use = True
            try:
                coroutines = [batch.coroutine for batch in step.micro_batches]
                chunked = self._head.applied() if takes_loss and self._head is not None else nullcontext()
                absent = self._run.absent.installed()
                with self._run.patch.applied(), chunked, absent, all_cancelled(coroutines):
                    yield
            finally:
                self._held.in_use = False
                self._run.attributes.end()
                torch.set_grad_enabled(grad)  # an interrupt may have left it otherwise

    @contextmanager
    def keeping_engine_open(self) -> Iterator[None]:
        """Let an error of the model in an evaluation end only the evaluation. Any other error closes the engine."""
        with self.closing_on_error():
            try:
                yield
                return
            except Exception as error:
                if not self._run.data_parallel.alone:  # the other ranks continue the evaluation
                    raise
                self._executor.recover()  # raises the failure, unless it was a computation's
                self._run.residency.drop_pass("evaluate", TIED)
                failed = error
        raise failed

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the engine if the body raises an error."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    @contextmanager
    def freeing_idle_buffers(self) -> Iterator[None]:
        """Free idle buffers before and after a pass of other sizes than a step of MeZO.

        Memory is planned for one of the two at a time: a step of MeZO, or catching up and evaluations.
        """
        self.free_idle_mezo_buffers()
        yield
        self.free_idle_mezo_buffers()

    def free_idle_mezo_buffers(self) -> None:
        """Free the idle buffers of a run of MeZO, once nothing is under way."""
        if self._run.zeroth is not None:
            self.wait()
            self._run.residency.pool.free_idle()

    def wait(self) -> None:
        """Wait until everything under way is over."""
        self.check_usable()
        self.refuse_incomplete()
        with self.closing_on_error():
            self._executor.drain()

    def give_up(self) -> None:
        """Stop without a further commit: what is under way ends, nothing else is written."""
        if self.uncommitted_step is not None and self.uncommitted_step.late_progress is not None:
            self.uncommitted_step.late_progress.cancel()
        self._executor.abort()
        self.close()

    def close(self) -> None:
        """Stop everything and unpatch the model. Nothing more is written."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_close()
        self._held.unguard()
        self._run.data_parallel.close()
        self._executor.close()
        self._run.optimizer.close()
        self._run.device.close()
        self._held.release()
        self._run.close()
        self._reports.engine_ends()

    def check_usable(self) -> None:
        """Raise ``EngineFailed`` once the engine is closed."""
        if self.is_closed:
            raise EngineFailed(
                f"this engine is closed; its run is whole up to step {self._run.durable_step}. Build a new one with "
                "holdfast.offload to resume."
            )

    def refuse_incomplete(self) -> None:
        """Raise ``EngineFailed`` if the newest step waits for the state of a loop."""
        if self.uncommitted_step is not None:
            raise EngineFailed(
                f"the loop has not completed step {self.uncommitted_step.number + 1}, whose commit waits for its state"
            )

    def exchange(
        self, what: str, check: Callable[[], Any] = lambda: None, how: Callable[[], str] = lambda: ""
    ) -> list[Any]:
        """Return what ``check`` returns on each rank.

        Collective: every rank must call this. ``BadInput`` is raised on all ranks, and all engines stay usable. After
        any other error of several ranks none is usable.

        Args:
            what: Name of the exchange, which must be the same on all ranks.
            check: Run on each rank.
            how: Asked after the check for details of the exchange, which must be the same on all ranks.
        """
        try:
            return self._run.data_parallel.call(what, check, how)
        except BadInput:
            raise
        except Exception:
            if not self._run.data_parallel.alone:
                self.give_up()
            raise

    def exchange_checked(
        self,
        what: str,
        micro_batches: Sequence[Any],
        loss_fn: Callable[..., Any] | None,
        check: Callable[[Sequence[Any]], Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the checked micro-batches of this rank, and what ``check`` returns for those of each rank.

        Collective: every rank must call this, with as many micro-batches as the others.

        Args:
            what: Name of the exchange, which must be the same on all ranks.
            micro_batches: This rank's micro-batches, as the caller gave them.
            loss_fn: As given to the engine.
            check: Run on each rank with its checked micro-batches.
        """
        batches: list[Any] = []

        def checked() -> Any:
            batches.extend(checked_batches(micro_batches, loss_fn, self._run.patch.blocks))
            return check(batches)

        gathered = self.exchange(what, checked, lambda: f" with {len(batches)} micro-batches")
        return batches, gathered
