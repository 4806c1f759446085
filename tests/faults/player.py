"""Plays the steps of one rank: what a torch user writes, with a check of every gradient and every weight, and a report of each.

An episode is the step of a fault and some healthy ones behind it. A cell is two healthy steps and one episode; a soak is many
episodes in one set of ranks.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megabucket.errors import MegabucketError

from .acts import ALL_LAYERS, Act, Acts, Do, Edit, find
from .cells import HEALTHY_STEPS, STEPS_AFTER, Cell, Combo, Expectation, Fault, FaultError, Form, Here, Outcome, Recovery
from .model import loss_of, make_batch
from .oracle import Oracle, edited, first_difference
from .systems import Scaled, System

_NOTHING_MORE: dict[str, Any] = {"cleanup_error": None, "last_error": None, "wrong_grads": "", "trained": ()}
"""What a rank reports of a step after which it calls nothing any more."""
Send = Callable[..., None]
FaultOf = Callable[[Cell], Fault]


@dataclass(frozen=True)
class Play:
    """What one set of ranks does: episodes, in a world with one setup.

    Attributes:
        config: fields of the config, besides those of the first cell's fault.
        steps_after: healthy steps behind each step with a fault.
    """

    cells: Sequence[Cell]
    config: dict[str, Any] = field(default_factory=dict)
    num_healthy: int = HEALTHY_STEPS
    steps_after: int = STEPS_AFTER
    momentum: float = 1.0

    @property
    def combo(self) -> Combo:
        """How the ranks are set up."""
        return self.cells[0].combo

    @property
    def num_steps(self) -> int:
        """All steps."""
        return self.num_healthy + len(self.cells) * (1 + self.steps_after)

    def fault_step(self, index: int) -> int:
        """Return the step in which an episode's fault happens."""
        return self.num_healthy + index * (1 + self.steps_after)


@dataclass(slots=True)
class _Attempt:
    """One step while it runs."""

    index: int
    acts: Acts
    checks_grads: bool
    trained: tuple[int, ...] = ()
    """The batches on whose gradients an update has been made."""
    means: dict[str, torch.Tensor | None] = field(default_factory=dict)
    wrong_grads: str = ""
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


def prepare(
    play: Play, rank: int, fault: Fault, system: System, send: Send, on_collective: dict[str, Any], communicator: Any = None
) -> Here | None:
    """Wrap the model of a rank; ``None`` when it was refused."""
    cell = play.cells[0]
    is_at_fault = fault.is_at_fault(cell, rank)
    model = (fault.own_build if is_at_fault and fault.own_build else fault.build)()
    first = system.wrap_alone(model) if fault.wraps_twice and is_at_fault else None
    send("fault", at_s=time.monotonic(), phase="wrap")
    fields = {**play.config, **fault.config, **(fault.own_config if is_at_fault else {})}
    if fields.get("use_distributed_optimizer") is False or fields.get("overlap_grad_reduce") is False:
        fields["overlap_param_gather"] = False  # would be refused, which is another error than the one looked for
    error: BaseException | None = None
    try:
        ddp = system.wrap(model, fields, communicator)
        if fault.around is not None:
            fault.around(ddp)
    except Exception as refused:
        error = refused
    finally:
        del first
    send("wrap", error=describe(error), at_s=time.monotonic())
    if error is not None:
        return None
    oracle = Oracle(
        fault.build().float(),
        cell.combo,
        rank,
        seed=cell.seed,
        momentum=play.momentum,
        zeros_for_unused=system.zeros_for_unused,
    )

    def make_optimizer() -> Any:
        return system.make_optimizer(model, ddp, play.momentum)

    return Here(cell, rank, send, model, ddp, make_optimizer(), oracle, make_optimizer, on_collective=on_collective)


class Player:
    """Trains, checks and reports on one rank."""

    def __init__(self, here: Here, system: System, play: Play, fault_of: FaultOf) -> None:
        self._here, self._system, self._play, self._fault_of = here, system, play, fault_of
        combo, self._is_ours = here.cell.combo, not here.cell.is_torch
        self._sees_whole_grads = not combo.is_sharded or not self._is_ours
        self._defers_weights = self._is_ours and combo.is_sharded and combo.overlaps
        self._unchecked: int | None = None
        self._num_errors_in_a_row = 0
        self.has_given_up = False
        """Whether the program would have ended here, by an interrupt or because training cannot go on."""

    def run(self) -> None:
        """Play all episodes."""
        play, here = self._play, self._here
        index: int | None = 0
        for number, cell in enumerate(play.cells):
            here.cell = cell
            fault, fault_step = self._fault_of(cell), play.fault_step(number)
            while index is not None and index < fault_step + 1 + play.steps_after:
                index = self._attempt(index, fault, fault_step)
        if index is not None:
            self._flush_weights()

    def _attempt(self, index: int, fault: Fault, fault_step: int) -> int | None:
        """Run one step, check it, report it; return the index of the next one, if there is one."""
        here, is_faulty = self._here, index == fault_step
        cell, ranks = here.cell, range(here.num_ranks)
        programs = [fault.acts(cell, rank, index, is_faulty=is_faulty) for rank in ranks]
        healthy = [fault.acts(cell, rank, index, is_faulty=False) for rank in ranks]
        skips = is_faulty and self._is_ours and fault.expect.outcome is Outcome.SKIPPED
        if is_faulty:
            self._flush_weights()
            here.snapshot = here.oracle.snapshot()
            if programs[here.rank] != healthy[here.rank]:
                here.announce()
        # Whoever left a batch out is one batch ahead of the others; right is what all ranks do with this one.
        in_step = [acts if all(act.batch in (0, index) for act in acts) else healthy[r] for r, acts in enumerate(programs)]
        attempt = _Attempt(index, programs[here.rank], checks_grads=self._sees_whole_grads and not skips)
        counter = self._counter()
        error = self._try_step(attempt, fault, in_step, is_faulty=is_faulty)
        at_s = time.monotonic()
        here.forget()
        if error is not None and fault.ends is not None and here.is_culprit:
            attempt.outputs.clear()
            fault.ends(here)
            here.send("step", attempt=index, at_s=time.monotonic(), counter=counter, error=describe(error), **_NOTHING_MORE)
            self.has_given_up = True
            return None
        report = {"attempt": index, "at_s": at_s, "counter": counter, "error": describe(error)}
        if isinstance(error, KeyboardInterrupt):  # the program ends; it does not talk to the others any more
            here.send("step", **report, **_NOTHING_MORE)
            self.has_given_up = True
            return None
        cleanup = self._clean_up() if error is not None else None
        if error is None and not skips:
            for _ in [act for act in attempt.acts if act.do is Do.STEP]:
                here.oracle.update()
        report |= {"cleanup_error": describe(cleanup), "last_error": self._last_error()}
        here.send("step", **report, wrong_grads=attempt.wrong_grads, trained=attempt.trained)
        self._unchecked = index
        if not self._defers_weights or error is not None:
            self._flush_weights()
        return self._next_index(index, error, fault, fault_step)

    def _counter(self) -> int:
        try:
            return self._system.counter(self._here.ddp)
        except MegabucketError:  # detached, or a rebuild that has failed
            return -1

    def _last_error(self) -> dict[str, Any] | None:
        try:
            return describe(getattr(self._here.ddp, "last_error", None))
        except Exception as lost:
            return describe(lost)

    def _try_step(self, attempt: _Attempt, fault: Fault, programs: Sequence[Acts], *, is_faulty: bool) -> BaseException | None:
        here = self._here
        try:
            if is_faulty and fault.arm is not None:
                fault.arm(here)
            attempt.means = here.oracle.compute(programs)
            with self._system.step_block(here.ddp) if fault.uses_block else nullcontext():
                here.reach("start")
                self._run_acts(attempt)
        except BaseException as error:
            error.__traceback__ = None  # it would keep graphs alive
            return error
        return None

    # Acts #

    def _run_acts(self, attempt: _Attempt) -> None:
        """Do everything in order; or what comes before the update in a closure, where the program is built so."""
        acts = attempt.acts
        if self._here.cell.combo.form is Form.CLOSURE and any(act.do is Do.STEP for act in acts):
            at = find(acts, Do.STEP)
            self._here.optimizer.step(lambda: [self._act(act, attempt) for act in acts[:at]])
            self._note_update(attempt)
            acts = acts[at + 1 :]
        for act in acts:
            self._act(act, attempt)
            if act.do is Do.STEP:
                self._note_update(attempt)

    def _note_update(self, attempt: _Attempt) -> None:
        attempt.trained = tuple(sorted({act.batch for act in attempt.acts if act.do is Do.FORWARD and act.how != "no_grad"}))

    def _act(self, act: Act, attempt: _Attempt) -> None:
        here, do = self._here, act.do
        if do is Do.FORWARD:
            attempt.outputs[act.slot] = self._forward(act)
            if act.layers == ALL_LAYERS and self._unchecked is not None:
                self._check_weights()  # of the step before, now that forward has gathered them
        elif do is Do.BACKWARD:
            here.reach("before backward")
            self._backward(act, attempt.outputs)
        elif do is Do.LOOK:
            here.reach("between")
            if attempt.checks_grads:
                grads = {name: param.grad for name, param in here.model.named_parameters() if param.requires_grad}
                scale = here.optimizer.scaler.get_scale() if isinstance(here.optimizer, Scaled) else 1.0
                means = {name: None if mean is None else mean * scale for name, mean in attempt.means.items()}
                attempt.wrong_grads = first_difference(grads, means)
        elif do is Do.GRAD:
            params = [param for param in here.model.parameters() if param.requires_grad]
            torch.autograd.grad(attempt.outputs.pop(act.slot), params, allow_unused=True)
        else:
            self._call(act)

    def _call(self, act: Act) -> None:
        """Make a call that concerns no output."""
        here, do = self._here, act.do
        if do is Do.STEP:
            here.optimizer.step()
        elif do is Do.ZERO:
            self._zero(act.value)
        elif do is Do.RAISE:
            raise FaultError
        elif do is Do.RUN:
            act.value(here)
        elif self._is_ours:
            calls: dict[Do, Callable[[], object]] = {
                Do.NUMBER: lambda: setattr(here.ddp, "step_number", act.value),
                Do.ABORT: lambda: here.ddp.abort_step(act.value),
                Do.START: here.ddp.start_grad_sync,
                Do.FINISH: here.ddp.finish_grad_sync,
            }
            calls[do]()

    def _zero(self, how: str) -> None:
        here = self._here
        if how == "program":  # as a program does that has caught an error
            how = "optimizer" if here.cell.combo.has_own_optimizer else "ddp"
        if how in ("optimizer", "in place"):
            here.optimizer.zero_grad(set_to_none=how == "optimizer")
        else:
            (here.model if how == "module" else here.ddp).zero_grad()

    def _no_sync(self, depth: int) -> ExitStack:
        stack = ExitStack()
        for _ in range(depth):
            stack.enter_context(self._here.ddp.no_sync())
        return stack

    def _forward(self, act: Act) -> torch.Tensor:
        here = self._here
        data_rank = here.cell.combo.data_rank(here.rank)
        inputs, targets = make_batch(seed=here.cell.seed, batch=act.batch, rank=data_rank, microbatch=act.microbatch)
        dtype = next(here.model.parameters()).dtype
        module = here.model if act.how == "inner" else here.ddp
        module.train(act.how != "eval")
        try:
            with self._no_sync(act.depth), torch.set_grad_enabled(act.how != "no_grad"):
                return loss_of(module(inputs.to(dtype), act.layers, act.checkpointed), targets)
        finally:
            module.train()

    def _backward(self, act: Act, outputs: dict[int, torch.Tensor]) -> None:
        keeps_graph = act.how == "keeps_graph"
        loss = outputs[act.slot] if keeps_graph else outputs.pop(act.slot)
        if act.joins >= 0:
            loss = loss + outputs.pop(act.joins)
        if isinstance(self._here.optimizer, Scaled):
            loss = self._here.optimizer.scaler.scale(loss)
        with ExitStack() as stack:
            for edit in act.edits:
                stack.callback(_add_hook(self._here.model.get_parameter(edit.param), edit).remove)
            try:
                with self._no_sync(act.depth):
                    loss.backward(retain_graph=keeps_graph)
                    self._system.after_backward(self._here)
            except FaultError:
                if act.how != "caught":
                    raise

    # After the step #

    def _clean_up(self) -> BaseException | None:
        """Clear gradients after an error where the rank does that, which half of the cells do: it is allowed, not needed."""
        here = self._here
        if isinstance(here.optimizer, Scaled):
            here.optimizer.give_up()
        if not here.cell.combo.is_sharded and not here.cell.combo.overlaps:
            return None
        try:
            here.optimizer.zero_grad()
        except Exception as error:
            return error
        return None

    def _next_index(self, index: int, error: BaseException | None, fault: Fault, fault_step: int) -> int | None:
        """Decide, after an error, whether and where training goes on."""
        if error is None:
            self._num_errors_in_a_row = 0
            return index + 1
        self._num_errors_in_a_row += 1
        if not self._is_ours:
            self.has_given_up = self._num_errors_in_a_row > 1
            return None if self.has_given_up else index + 1
        is_culprit = self._here.is_culprit
        expected = _expectation_met(fault.expect, error, late_by=index - fault_step, is_culprit=is_culprit)
        if expected.recovery in (Recovery.OVER, Recovery.STOP):
            if expected.recovery is Recovery.OVER:
                self._probe(index)
            self.has_given_up |= fault.ends is not None  # the others end with it, so that all see closed connections
            return None
        if index == fault_step + expected.steps_late(is_culprit=is_culprit):
            try:
                if fault.recover is not None:
                    fault.recover(self._here)
                if expected.recovery is Recovery.RELOAD:
                    self._here.reload()
            except Exception as failed:
                self._here.send("no recovery", attempt=index, error=describe(failed))
                return None
            if expected.recovery is Recovery.RELOAD:
                return fault_step + expected.later_by + 1  # a checkpoint says which step is next, on every rank
        return index + 1 if len(self._play.cells) > 1 or self._num_errors_in_a_row < 3 else None

    def _probe(self, index: int) -> None:
        """Ask a wrapper that should be broken for one more step, which must be refused."""
        here = self._here
        error: BaseException | None = None
        try:
            self._backward(Act(Do.BACKWARD), {0: self._forward(Act(Do.FORWARD, batch=index))})
            here.optimizer.step()
        except BaseException as refused:
            error = refused
        here.send("probe", attempt=index, error=describe(error))

    # Weights #

    def _flush_weights(self) -> None:
        """Check weights that were not checked yet, gathering them if need be."""
        if self._unchecked is None:
            return
        try:
            if self._is_ours:
                self._here.ddp.finish_param_sync()
        except Exception as error:  # the group is gone: the values are, too
            self._here.send("no weights", attempt=self._unchecked, error=describe(error))
            self._unchecked = None
            return
        self._check_weights()

    def _check_weights(self) -> None:
        index, self._unchecked = self._unchecked, None
        weights = {name: param.detach() for name, param in self._here.model.named_parameters()}
        digest = 0  # of what all ranks hold alike
        for value in (value for name, value in weights.items() if self._here.cell.combo.holds_same(0, 1, name)):
            digest = zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy(), digest)
        self._here.send(
            "weights",
            attempt=index,
            wrong=first_difference(weights, self._here.oracle.weights()),
            is_finite=all(bool(value.isfinite().all()) for value in weights.values()),
            digest=digest,
        )


def _add_hook(param: torch.Tensor, edit: Edit) -> Any:
    """Let a hook edit the gradient on its way, or one that runs when it has been accumulated."""

    def after(param: torch.Tensor) -> None:
        assert param.grad is not None
        if edit.what == "doubled":
            param.grad.mul_(2.0)
        else:
            param.grad = param.grad * 2.0 if edit.what == "replaced" else None

    if edit.what in ("doubled", "replaced", "cleared"):
        return param.register_post_accumulate_grad_hook(after)
    return param.register_hook(lambda grad: edited(grad, edit))


def _expectation_met(expected: Expectation, error: BaseException, *, late_by: int, is_culprit: bool) -> Expectation:
    """Return the way to end that an error belongs to: that of its class, in the right step if there is one."""
    names = {kind.__name__ for kind in type(error).__mro__}
    met = [one for one in expected.alternatives() if names & {*one.errors, *one.own_error}]
    in_step = [one for one in met if one.steps_late(is_culprit=is_culprit) == late_by]
    return (*in_step, *met, expected)[0]


def describe(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error as plain data: its class, its text, and where it is ours its fields."""
    if error is None:
        return None
    fields = dict(vars(error)) if isinstance(error, MegabucketError) else {}
    bases = [kind.__name__ for kind in type(error).__mro__]
    return {"class": type(error).__name__, "text": str(error), "fields": fields, "bases": bases}
