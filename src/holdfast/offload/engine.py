"""The engine: an interpreter of operation lists that holds one model's training run.

``step`` turns micro-batches into a ``Step``, has the executor run the schedule's operations on it, and reports the
result. It returns when the last computation is over. Updates, writes and the commit of a step continue beside the next
step, which waits for exactly what it needs.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..errors import BadInput
from ..events import EventLog
from ..optim.torch_threads import one_torch_thread, update_threads
from ..schedule.operations import Op
from ..schedule.work import ClippingMode
from ..state.capture import Captured
from ..state.encoding import decode
from ..state.progress import hyper_parameters, restore_random_state
from ..store.format.manifest import Manifest
from ..supervised.attempt import Witness
from ..supervised.standing_by import say_closed
from .engine_guard import EngineGuard
from .engine_progress import UserState
from .executor import Executor
from .exit_hook import closed, finish_at_exit
from .loss_scaling import first_label_counts, mean_of, questions
from .model.microbatches import (
    OwnCall,
    evaluating,
    extract_loss,
    late_call,
)
from .offload_options import StepRules
from .ops import handlers
from .ops.commit_ops import publish
from .runtime import Runtime
from .setup.equal_on_ranks import digest, hyper_parameters_by_key, refuse_unlike
from .setup.model_values import (
    HeldModel,
    Keep,
    as_it_is,
    edits_text,
    newest_values,
    state_dict,
    trained_values,
)
from .setup.preflight import Preflight
from .setup.process_settings import give_back_freed, on_host_by_default
from .setup.starting_state import StartingState
from .setup.step_planning import RunPlan
from .step_maker import StepMaker
from .step_reports import StepReports, count_tokens, traffic
from .text_sampling import ROWS, checked_rows, chooser, continued, last_logits

POSITIONS = ("random", "loader", "results")
"""Parts of the progress that change when a batch is fetched, or belong to the newest step."""
Texts = TypeVar("Texts", torch.Tensor, list[torch.Tensor])


class _Checked(NamedTuple):
    """The next step as one rank would do it, with its micro-batches checked."""

    counts: list[float]
    """The count of each micro-batch."""
    tokens: int
    rates: str
    """The digest of its hyper-parameters."""
    edited: list[str]
    """The names of parameters that were edited."""
    clipping: ClippingMode | None
    """The way of clipping that it would take."""
    recomputed_fraction: float
    """The fraction of the blocks that it would compute again."""


class Engine:
    """A model whose training state lives outside the device. Built by ``holdfast.offload``."""

    def __init__(
        self,
        run: Runtime,
        plan: RunPlan,
        rules: StepRules,
        *,
        captured: Captured,
        user: UserState,
        preflight: Preflight,
        events: EventLog,
        update_workers: int,
        caches: list[Any],
        witness: Witness | None = None,
    ) -> None:
        """Build an engine.

        ``caches`` are the configurations in which ``close`` switches a key-value cache on again. ``witness`` notes
        every step of a drill.
        """
        self._run, self._plan, self._rules, self._steps = run, plan, rules, StepMaker(run, plan, rules)
        self._user, self._witness = user, witness
        self.held = HeldModel(run, captured, user.optimizer, caches)
        self.preflight = preflight
        run.optimizer.start_helpers(update_workers, update_threads(run.device.unified, update_workers))
        self._executor = Executor(
            handlers(run),
            update_workers,
            lambda: (one_torch_thread(), run.device.use()),
            run.device.ahead,
            exchanges=not run.data_parallel.alone,
        )
        self._reports = StepReports(run, plan, rules.schedule, self._executor, events)
        self._guard = EngineGuard(run, self.held, self._executor, self._reports, lambda: closed(self))
        self.steps_done = 0
        """Number of optimizer steps done, skipped ones included."""
        self.resumed_from: int | None = None
        self.lost_steps_text = ""
        """Sentence about what is known to have been lost at the resume."""
        self.skipped_steps = 0
        self._positions: dict[str, Any] = {}  # since the last step; a batch may have been fetched meanwhile
        self.last: dict[str, Any] = {}
        """The fields of the last step's event, and the fraction of the blocks that it computed again."""
        self.results: dict[str, Any] | None = None
        """Results of the newest step's own calls, and its gradient norm, also after a resume; None without them."""

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss; -1 before the first commit."""
        return self._run.durable_step

    # What a user calls

    @on_host_by_default
    def step(self, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None = None) -> float:
        """Do one optimizer step over ``micro_batches`` and return the mean loss.

        Micro-batches are mappings of the model's keywords, or tuples with ``loss_fn``. The step is durable when
        ``durable_step`` has reached ``steps_done``; at most one step is on its way. A loss that is not finite skips the
        update, and ``last["skipped"]`` says so. Collective: every rank must call this.
        """
        self._guard.check_usable()
        self._guard.refuse_incomplete()
        what = f"step {self.steps_done + 1}"
        micro_batches = self._ask_about_labels(what, micro_batches, loss_fn)
        micro_batches, gathered = self._guard.exchange_checked(what, micro_batches, loss_fn, self._checked)
        self._refuse_unlike_rates(what, [each.rates for each in gathered])
        self._refuse_edits([each.edited for each in gathered])
        weights = self._steps.weights([each.counts for each in gathered], len(micro_batches))
        tokens = sum(each.tokens for each in gathered)
        with self._guard.closing_on_error():
            started = time.perf_counter()
            again = max(each.recomputed_fraction for each in gathered)  # as the rank with least memory
            step = self._steps.training(
                self.steps_done, micro_batches, weights, loss_fn, gathered[0].clipping, again
            )
            self._user.step_scheduler()  # the hyper-parameters were taken: from now on they are the next step's
            if self._user.is_late:
                self._guard.uncommitted_step, step.late_progress = step, Future()
            else:
                step.progress = self._progress()
                self._positions = {k: step.progress[k] for k in POSITIONS if k in step.progress}
            takes_loss = loss_fn is None and all(_takes_loss(batch) for batch in micro_batches)
            with self._guard.running(step, takes_loss), torch.set_grad_enabled(self._run.zeroth is None):
                step.resident_grads = self._run.residency.start_resident_grads()
                self._reports.begins(step)
                self._executor.run(step.operations, step)
            self._positions |= step.all_results()
            self.results = self._positions.get("results")
            self._reports.returns(step)
            self._steps.over(step, time.perf_counter() - started)
            self.steps_done += 1
            self._user.look_for_forgotten()
            self.skipped_steps += step.skipped
            event = self._reports.over(step, self.steps_done, tokens, time.perf_counter() - started)
            self.last = event | {"recomputed_fraction": step.shape.recomputed_fraction}
        if self._witness is not None:
            progress = ({} if self._user.is_late else self._progress()) | {"loss": self.last["loss"]}
            self._witness.stepped(self.steps_done, {}, progress, self.close, lambda: self.durable_step)
        return self.last["loss"]

    def take_hyper_parameters(self) -> None:
        """Let the step under way use the hyper-parameters as they are now, not as they were when it began.

        For a loop with ``is_late = True``, while the step waits for it and has updated nothing.
        """
        assert self._guard.uncommitted_step is not None
        self._guard.uncommitted_step.hyper = self._run.optimizer.snapshot()

    def complete_step(self, again: bool = False) -> bool:
        """Take the loader's state, which a loop has changed since the newest step; its commit waits for this.

        For a loader with ``is_late = True``, whose loop must call this before anything but an evaluation. With
        ``again`` a step that was completed is committed once more, with what has changed since. Returns True if the
        step was not completed before.
        """
        assert not self.held.in_use, "the step is under way"
        step, self._guard.uncommitted_step = self._guard.uncommitted_step, None
        if step is None and again:
            progress = self._progress()
            self._positions |= {k: progress[k] for k in POSITIONS if k in progress}
            self.wait()
            self._save(commit=True)
        if step is None:
            return False
        assert step.late_progress is not None
        with self._guard.closing_on_error():
            progress = self._progress()
        self._positions = {k: progress[k] for k in POSITIONS if k in progress} | step.all_results()
        step.late_progress.set_result(progress | {"skipped_steps": self.skipped_steps - step.skipped})
        return True

    def _checked(self, micro_batches: Sequence[Any]) -> _Checked:
        """Check that the step can be done, and return what the other ranks need to know of it."""
        self.held.refuse_changes()
        if not micro_batches:
            raise BadInput("a step needs at least one micro-batch")
        if not torch.is_grad_enabled() and self._run.zeroth is None:
            raise BadInput(
                "a step needs gradients: call engine.step outside torch.no_grad() and inference_mode()"
            )
        return _Checked(
            self._steps.counts(micro_batches), count_tokens(micro_batches), digest(self._rates()), self.held.edited(),
            self._steps.next_clipping, self._steps.recomputed_fraction(micro_batches),
        )  # fmt: skip

    @on_host_by_default
    def evaluate(self, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None = None) -> float:
        """Return the mean loss over ``micro_batches``, with the weights of the last step and without recording
        anything.

        Each micro-batch counts what ``normalize`` says: by default all the same, whatever their sizes. NaN where none
        counts. Collective: each rank passes its own micro-batches, as many as the others, and the mean is over all
        ranks.
        """

        def counted(micro_batches: Sequence[Any]) -> list[float]:
            if not micro_batches:
                raise BadInput("an evaluation needs at least one micro-batch")
            return self._steps.counts(micro_batches)

        self._guard.check_usable()
        micro_batches = self._ask_about_labels("an evaluation", micro_batches, loss_fn)
        micro_batches, counts = self._guard.exchange_checked("an evaluation", micro_batches, loss_fn, counted)
        weights = self._steps.weights(counts, len(micro_batches))
        losses = self._losses(micro_batches, loss_fn)
        gathered = self._guard.exchange(
            "the end of an evaluation", lambda: list(zip(losses, weights, strict=True))
        )
        losses, weights = zip(*(pair for each in gathered for pair in each), strict=True)
        return mean_of(losses, weights) if any(weight != 0 for weight in weights) else math.nan

    def _ask_about_labels(
        self, what: str, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None
    ) -> Sequence[Any]:
        """Find out by two forward passes, once, whether the model counts first labels, where counts depend on it.

        Collective: all ranks take part if one of them has to ask. A model that fails at it is not asked again now.
        """
        if not self._steps.may_ask:
            return micro_batches
        batches, gathered = self._guard.exchange_checked(
            f"{what}, whose labels are counted",
            micro_batches,
            loss_fn,
            lambda batches: self._steps.unclear(batches) is not None,
        )
        if not any(gathered):
            return batches
        mine = self._steps.unclear(batches)
        pair = [batches[0]] * 2 if mine is None else questions(mine)
        try:
            losses = self._losses(pair, loss_fn)
        except Exception as error:
            if self._guard.is_closed:
                raise
            raise BadInput(
                f'normalize="tokens" asks the model whether it counts the first of its "labels", with a micro-batch of'
                f" which no other counts, and the model failed: {error}. Pass a function from a micro-batch to its"
                " number of target tokens instead."
            ) from error
        answer = None if mine is None else not first_label_counts(losses)
        answers = self._guard.exchange(f"{what}, whose labels are known", lambda: answer)
        self._steps.shifts = next((each for each in answers if each is not None), None)
        return batches

    @on_host_by_default
    def generate(
        self,
        tokens: Texts,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        context: int | None = None,
    ) -> Texts:
        """Return ``tokens`` continued by ``max_new_tokens`` sampled tokens for each text.

        A token of each text takes one pass over the blocks for up to 64 texts of one length, or up to 8 of several
        lengths; on several ranks for 8 texts, and for fewer under a small budget. Text number i is continued as it
        would be alone with the seed ``seed + i``. Texts of one length that share a forward pass, as more than 8 do, may
        have logits that round otherwise. Collective: each rank passes its own texts, as many as the others. Raises
        ``BadInput``.

        Args:
            tokens: int64[texts, T]; or a list of int64[T], also of several lengths, for which a list is returned.
            max_new_tokens: The number of tokens to add to each text.
            temperature: The factor by which logits are divided; 0 takes the likeliest token.
            top_k: The number of likeliest tokens to draw from; None draws from all.
            seed: The seed of the first text.
            context: The number of tokens that the model sees; None shows it all.
        """
        rows, together = checked_rows(tokens), self._plan.evaluation_batches
        choosers = [chooser(temperature, top_k, seed + i) for i in range(len(rows))]
        # ranks have to make as many forward passes, whatever the lengths
        at_once = min(-(-len(rows) // together), ROWS) if self._run.data_parallel.alone else 1

        def model(windows: list[torch.Tensor]) -> list[torch.Tensor]:
            send = self._run.device.take_batch
            calls = [late_call(self._run.model, (window,), None, send) for window in windows]
            return self._forward([lambda call=call: last_logits(call()) for call in calls])

        made = continued(model, rows, max_new_tokens, choosers, context, at_once)
        if isinstance(tokens, torch.Tensor):
            return torch.stack(made).to(tokens.device)  # type: ignore[return-value]
        return [row.to(given.device) for row, given in zip(made, tokens, strict=True)]  # type: ignore[return-value]

    @on_host_by_default
    def save(self) -> None:
        """Commit the present state. It is durable when this returns."""
        self._guard.check_usable()
        if self.durable_step == self.steps_done and not self._is_behind:
            return
        self.wait()
        if self.durable_step < self.steps_done or self._is_behind:
            self._save(commit=True)

    @on_host_by_default
    def wait(self) -> None:
        """Wait until everything under way is over: updates done, and the commit, where one was due, durable."""
        self._guard.wait()

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, by rank, at ``what``, a place that all ranks have to reach.

        Collective: every rank must call this. Raises ``RankFailed`` if another rank makes another call.
        """
        self._guard.check_usable()
        return self._guard.exchange(what, lambda: value)

    @on_host_by_default
    def state_dict(self, *, trained: bool = False, keep: Keep | None = as_it_is) -> dict[str, torch.Tensor]:
        """Return every parameter in fp32 and every persistent buffer, by the model's names, in host memory.

        Collective: every rank must call this.

        Args:
            trained: True for what is trained alone, such as an adapter, and what PEFT saves beside adapters; the rest
                is not read.
            keep: Called with the name and the value of each parameter as it is read, one block after another; returns
                the tensor to hold in its place. By default the value itself, so that all are in memory at once. None
                on a rank that is to get nothing.
        """
        self._guard.check_usable()
        self._refuse_edits(self._guard.exchange("state_dict", self.held.edited))
        return self._values(trained, keep)

    def _values(self, trained: bool = False, keep: Keep | None = as_it_is) -> dict[str, torch.Tensor]:
        self._catch_up()
        self.wait()
        alone = self._run.data_parallel.alone
        with self._reports.uncounted(), nullcontext() if alone else self._guard.closing_on_error():
            values = trained_values if trained else state_dict
            return values(self._run, self.held.captured, keep)

    @on_host_by_default
    def close(self) -> None:
        """Finish and commit what is under way, give the model back, and release the run directory.

        Parameters that were real when the model was handed over get their trained values; those that were on ``meta``
        stay there. A second call does nothing, unless the first was interrupted (Ctrl-C): then it gives the model the
        values of the newest commit.
        """
        held = self.held
        if self._guard.is_closed:
            if held.is_owed:
                held.give_back(newest_values(self._run, held.were_real))
            return
        held.is_owed = bool(held.were_real)
        edited: list[str] = []
        trained: dict[str, torch.Tensor] = {}
        with self._guard.closing_on_error():
            self._guard.refuse_incomplete()
            self._executor.drain()
            self._reports.end()
            if self._rules.commit_every:
                self.save()
            if self._run.data_parallel.rank == 0:
                say_closed(self._run.store.root)
            gathered = self._guard.exchange("close", lambda: (bool(held.were_real), held.edited()))
            edited = sorted({name for _, found in gathered for name in found})
            if any(real for real, _ in gathered):
                self._run.residency.pool.free_idle()
                give_back_freed()  # as the values of the whole model come
                trained = self._values()
            self._guard.exchange("the end of close")  # no rank leaves before all have their values
        self._guard.close()
        held.give_back({name: trained[name] for name in held.were_real})
        if edited:
            warnings.warn(f"{edits_text(edited)}: it was lost", stacklevel=3)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._guard.is_closed:
            if issubclass(
                kind, (Exception, SystemExit)
            ):  # an error of the script's own: what was computed is still committed
                with suppress(Exception):
                    self.close()
            else:
                self.give_up()

    @on_host_by_default
    def give_up(self) -> None:
        """Stop without a further commit: what is under way ends, nothing else is written. The run stays whole."""
        self._guard.give_up()

    def interrupt(self) -> None:
        """Make a step that runs on another thread raise ``KeyboardInterrupt`` at its next safe point."""
        self._executor.safe_point = _interrupted

    # Observation

    @property
    def is_closed(self) -> bool:
        """True once the engine is closed, or has failed."""
        return self._guard.is_closed

    @property
    def operations(self) -> dict[Any, list[Op]]:
        """The operation lists made so far, by schedule and shape."""
        return self._steps.lists

    def traffic(self) -> dict[tuple[str, str], int]:
        """Return the bytes moved since the engine was built, by (lane, kind of operation)."""
        return traffic(self._run)

    def trace(self, spans: list | None) -> None:
        """Record in ``spans`` when every operation runs; None stops recording."""
        self._executor.spans = spans

    # Steps

    @property
    def _is_behind(self) -> bool:
        """True if the weights lack the last step (of MeZO), which the next step would apply."""
        return self._run.zeroth is not None and self._run.zeroth.is_behind

    def _catch_up(self) -> None:
        """Bring all weights up to the last step."""
        self._guard.check_usable()
        if self._is_behind:
            self.wait()
            self._save(commit=self._rules.commit_every > 0)

    def _save(self, commit: bool) -> None:
        step = self._steps.saving(self.steps_done - 1, self._progress() | self._positions, commit)
        with self._guard.freeing_idle_buffers(), self._guard.closing_on_error(), self._guard.running(step):
            self._guard.exchange(f"save after step {self.steps_done}")
            self._executor.run(step.operations, step)
            self._executor.drain()

    def _losses(self, micro_batches: Sequence[Any], loss_fn: Callable[..., Any] | None) -> list[float]:
        """Return the loss of each micro-batch, in evaluation mode and without gradients."""
        model, send = self._run.model, self._run.device.take_batch
        calls = [late_call(model, batch, loss_fn, send) for batch in micro_batches]
        return self._forward(
            [lambda call=call: float(extract_loss(call())) for call in calls], loss_fn is None
        )

    @on_host_by_default
    def run_calls(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what each of ``calls`` returns, each a function that calls the model once.

        They run in evaluation mode and without gradients, up to eight of them in one pass over the blocks.
        """
        return self._forward(list(calls))

    def take_calls(self, modules: Sequence[nn.Module], check: Callable[[], object] = lambda: None) -> None:
        """Let the script call the model itself under ``torch.no_grad()``, between steps: each call is one pass.

        Calls on other threads than this one are refused, as training is under way there.

        Args:
            modules: The model, and modules inside of it that are called by themselves, such as one in adapters.
            check: Called before each call; raises if the model's values are not those that the script expects.
        """

        def run(call: Callable[[], Any]) -> Any:
            check()
            return self.run_calls([call])[0]

        self.held.take_calls(modules, run)

    def _forward(self, calls: list[Callable[[], Any]], takes_loss: bool = False) -> list[Any]:
        """Return the model's result for each call, in evaluation mode and without gradients."""
        self._guard.check_usable()
        self._catch_up()
        self._refuse_edits(
            self._guard.exchange(f"a forward pass of {len(calls)} micro-batches", self.held.edited)
        )
        results: list[Any] = []
        together = self._plan.evaluation_batches
        with evaluating(self._run.model), self._guard.freeing_idle_buffers(), self._reports.uncounted():
            for start in range(0, len(calls), together):
                step = self._steps.evaluation(calls[start : start + together])
                with (
                    self._guard.keeping_engine_open(),
                    torch.no_grad(),
                    self._guard.running(step, takes_loss),
                ):
                    self._executor.run(step.operations, step)
                results += [batch.result for batch in step.micro_batches]
        return results

    def _rates(self) -> dict[str, Any]:
        """Return the hyper-parameters of a step, which must be equal on all ranks; empty in a process without
        others."""
        if self._run.data_parallel.alone:
            return {}
        return hyper_parameters_by_key(hyper_parameters(self._user.optimizer.param_groups))

    def _refuse_unlike_rates(self, what: str, digests: Sequence[str]) -> None:
        """Raise ``BadInput`` on all ranks unless the ``digests`` of their hyper-parameters are equal."""
        if len(set(digests)) > 1:
            gathered = self._guard.exchange(f"{what}, whose hyper-parameters differ", self._rates)
            refuse_unlike(gathered, "hyper-parameters", "Set the same on all ranks before a step")

    def _refuse_edits(self, found: Sequence[Sequence[str]]) -> None:
        """Raise ``BadInput`` on all ranks if one has ``found`` edits, after the run's values were put back."""
        edited = sorted({name for names in found for name in names})
        if not edited:
            return
        self.wait()
        with self._guard.closing_on_error():
            self.held.undo_edits()
        raise BadInput(
            f"{edits_text(edited)}. The run's values were put back, and the engine goes on with them. To change"
            " them, take engine.state_dict() and close() the engine, load what you have changed into the model, and"
            " begin a run in another directory."
        )

    # Progress

    def guard(self) -> None:
        """Make the model refuse direct use, make steps refuse changes to it, and close at the end of the process."""
        self.held.guard()
        finish_at_exit(self)

    def begin(self, found: Manifest | None, beginning: StartingState | None = None) -> None:
        """Set the engine to the step that the runtime was filled from: a commit, or a state from elsewhere.

        A fresh run gets its first commit: the state before training begins.
        """
        self._user.hand_over()
        if beginning is not None:
            self.steps_done = self.resumed_from = beginning.step
            self._steps.resume(beginning.progress)
            self._run.transient.restore(beginning.progress)
            if "random" in beginning.progress:
                restore_random_state(decode(beginning.progress["random"]))
        if found is None:
            publish(self._run, self.steps_done, self._progress())
        else:
            self.steps_done = self._run.durable_step = self.resumed_from = found.step
            self.skipped_steps = found.progress.get("skipped_steps", 0)
            restore_random_state(decode(found.progress["random"]))
            self._positions = {k: found.progress[k] for k in POSITIONS if k in found.progress}
            self.results = self._positions.get("results")
            self._steps.resume(found.progress)
            self._run.transient.restore(found.progress)
            if self._run.zeroth is not None:
                self._run.zeroth.resume(found.progress, self._run.units)
        self._guard.free_idle_mezo_buffers()
        self._reports.engine_begins(self.preflight, self.steps_done)

    def _progress(self) -> dict[str, Any]:
        """Return this rank's progress after the present step: everything besides tensors that a resume needs."""
        transient = self._run.transient.changed()
        return {
            **self._user.now(),
            **self._steps.progress(),
            **transient,
            "skipped_steps": self.skipped_steps,
        }


def _interrupted() -> None:
    raise KeyboardInterrupt


def _takes_loss(batch: Any) -> bool:
    """Return whether nothing but the loss is taken from the model's result for ``batch``."""
    return not isinstance(batch, OwnCall) or batch.takes_loss
