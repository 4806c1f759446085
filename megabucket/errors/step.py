"""Errors about a step. All ranks raise the same one with the same text, which says which rank is at fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from megabucket.errors.base import MegabucketError, name_list, rank_list, values_by_rank

_DROPPED: Final = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
_GROUPS_SHOWN: Final = 3
_REBUILD_AGAIN: Final = (
    "Repair it and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept."
)
# Where ranks agree before any step: what differs, and why it matters and what to do.
_MISMATCHES: Final = {
    "wrap": (
        "the model is not the same on all ranks",
        (
            "Gradients of one parameter would be added to those of another. Build the same module in the same order on every "
            "rank, with the same dtypes, trainability, config and versions. No rank was wrapped."
        ),
    ),
    "DistributedOptimizer()": (
        "the optimizer is not the same on all ranks",
        (
            "Each rank would update its shards in its own way. Build it with the same groups and hyperparameters on every "
            "rank, and load its state on all ranks or on none. The optimizer was changed on no rank."
        ),
    ),
    "rebuild": (
        "what is to be rebuilt is not the same on all ranks",
        (
            "Each rank would update its shards in its own way. Every rank needs the same optimizer, with the same groups, "
            f"hyperparameters and state. {_REBUILD_AGAIN}"
        ),
    ),
    "state_dict()": (
        "what is to be saved is not the same on all ranks",
        "Call state_dict() on every rank at the same place, between two steps.",
    ),
    "save_checkpoint()": (
        "what is to be saved is not the same on all ranks",
        "Call save_checkpoint() on every rank at the same place, between two steps. Nothing was saved.",
    ),
    "load_state_dict()": (
        "the optimizer state to load is not the same on all ranks",
        (
            "Each rank would update its shards in its own way. Load the same state on every rank. Nothing was loaded on any "
            "rank."
        ),
    ),
}
_SAME_HYPERPARAMETERS: Final = (
    "Set them alike on every rank: look for a scheduler that follows a local loss, for scale_gradients() with a local count, "
    "for an optimizer's checkpoint that was loaded on one rank only."
)
# Why weights differ.
_USUAL_CAUSES: Final = {
    "update": (
        "Every rank must step after every sync: look for an exception that was caught around optimizer.step() on one rank."
    ),
    "hyperparameters": f"Each rank has updated them in its own way. {_SAME_HYPERPARAMETERS}",
    "load": (
        "Load on every rank, or call ddp.broadcast_params() on every rank right after a load on the first; a rank that loads "
        "weights only to look at them does so in a copy: copy.deepcopy(ddp.module)."
    ),
}
_AFTER_FAILURE: Final = {
    "optimizer": "Its shard of the parameters may miss the update, or half of it: load the last checkpoint on every rank.",
    "wrap": "No rank was wrapped.",
    "DistributedOptimizer()": "The optimizer was changed on no rank.",
    "rebuild": _REBUILD_AGAIN,
    "state_dict()": "Nothing was changed on any rank.",
    "save_checkpoint()": "Nothing was saved.",
    "load_state_dict()": "Nothing was loaded on any rank.",
}


class RanksDisagreeError(MegabucketError, RuntimeError):
    """The ranks are not doing the same, so a reduction would mix things that do not belong together."""


class LayoutMismatchError(RanksDisagreeError):
    """Ranks wrap different models or optimizers, or with different configs or versions."""

    def __init__(self, *, differences: Sequence[str], num_different: int, num_entries: int, phase: str = "wrap") -> None:
        self.differences, self.num_different, self.num_entries = tuple(differences), num_different, num_entries
        self.phase = phase
        hidden = num_different - len(self.differences)
        more = f"; and {hidden} more" if hidden > 0 else ""
        what, consequence = _MISMATCHES[phase]
        super().__init__(
            f"{what}: {'; '.join(self.differences)}{more} ({num_different} of {num_entries} entries differ). {consequence}"
        )


class StepMismatchError(RanksDisagreeError):
    """A rank skipped or dropped a step that others are in."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[int]) -> None:
        self.step, self.what, self.by_rank = step, what, tuple(by_rank)
        super().__init__(
            f"step {step}: {what} differ between ranks: {values_by_rank(self.by_rank)}. Some rank has skipped or dropped a "
            "step that others have taken, so batches of different steps would be averaged. Make every rank take every step: a "
            "rank that cannot use its batch calls abort_step(), and all drop the step together. A forward that is not for "
            f"training belongs under torch.no_grad() or module.eval(). {_DROPPED}"
        )


class MicrobatchMismatchError(RanksDisagreeError):
    """Ranks accumulated different numbers of backwards in one step."""

    def __init__(self, *, step: int, by_rank: Sequence[int]) -> None:
        self.step, self.by_rank = step, tuple(by_rank)
        super().__init__(
            f"step {step}: microbatch counts differ between ranks: {values_by_rank(self.by_rank)}. The mean over ranks would "
            "weigh them unequally. Run as many backwards per step on every rank, all but the last one inside no_sync(). "
            f"{_DROPPED}"
        )


class ScheduleMismatchError(RanksDisagreeError):
    """Ranks launched different collectives for the same step."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[int]) -> None:
        self.step, self.what, self.by_rank = step, what, tuple(by_rank)
        super().__init__(
            f"step {step}: {what} differs between ranks: {values_by_rank(self.by_rank)}. Ranks that launch different "
            f"collectives mix unrelated data. Set it alike on every rank before backward. {_DROPPED}"
        )


class HyperparameterMismatchError(RanksDisagreeError):
    """Ranks were about to update with different learning rates, or other numbers of the optimizer."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[float | str]) -> None:
        self.step, self.what, self.by_rank = step, what, tuple(by_rank)
        super().__init__(
            f"step {step}: hyperparameters differ between ranks: {what} is {values_by_rank(self.by_rank)}. Each rank would "
            "update its shard of the parameters in its own way, and nobody could see it in the weights, which are gathered "
            f"afterwards. {_SAME_HYPERPARAMETERS} No rank has updated. {_DROPPED}"
        )


class ReplicasDivergedError(RanksDisagreeError):
    """The replicas do not hold the same weights any more."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[float | str], usual_cause: str = "update") -> None:
        self.step, self.what, self.by_rank, self.usual_cause = step, what, tuple(by_rank), usual_cause
        super().__init__(
            f"step {step}: {what} differ between ranks: {values_by_rank(self.by_rank)}. The replicas do not hold the same "
            f"weights any more, and gradients of different models would be averaged. {_USUAL_CAUSES[usual_cause]} Load the "
            "last checkpoint on every rank, or call ddp.broadcast_params() and make the optimizer anew."
        )


class PhaseError(MegabucketError, RuntimeError):
    """An operation in a phase where it is not allowed."""


class LateGradientError(PhaseError):
    """A gradient arrived after its bucket had been sent."""

    def __init__(self, *, step: int, rank: int, params: Sequence[str], bucket: int, num_buckets: int, phase: str) -> None:
        self.step, self.rank, self.params, self.phase = step, rank, tuple(params), phase
        self.bucket, self.num_buckets = bucket, num_buckets
        super().__init__(
            f"step {step}: on rank {rank} {name_list(self.params)} received a gradient although bucket {bucket} of "
            f"{num_buckets} (counted from 0) is {phase}. That gradient is in no reduction, so the step would be wrong. "
            "Usual causes: a second backward without zero_grad() or outside no_sync() (wrap all but the last backward of a "
            "step in no_sync()), or reentrant activation checkpointing of a layer that is used several times (pass "
            f"use_reentrant=False). {_DROPPED}"
        )


class ConcurrentBackwardError(PhaseError):
    """Two threads run backward through one wrapper at the same time."""

    def __init__(self, *, rank: int, thread: str, other_thread: str) -> None:
        self.rank, self.thread, self.other_thread = rank, thread, other_thread
        super().__init__(
            f"[rank {rank}] thread {thread!r} runs a backward while one of thread {other_thread!r} is still running. Both add "
            "into the same gradient buffer, so the sums would depend on timing. Run one backward at a time, for instance "
            "under a lock, or give each thread a wrapper of its own."
        )


class UnreducedGradientsError(PhaseError):
    """The optimizer was asked to step although gradients are still local."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        super().__init__(
            "step() was called, but the gradients are not reduced: since the last step or zero_grad(), no backward has run "
            "outside no_sync(), or finish_grad_sync() was not called where the config leaves that to the caller "
            "(finish='explicit'). Run the last backward of the step outside no_sync(), or call finish_grad_sync() yourself."
        )


class UnusedParameterError(MegabucketError, RuntimeError):
    """Parameters that got no gradient in the whole step."""

    def __init__(
        self,
        *,
        step: int,
        ranks: Sequence[int],
        params: Sequence[str],
        bucket: int,
        num_buckets: int,
        num_ranks: int,
        elsewhere: Sequence[tuple[Sequence[str], Sequence[int]]] = (),
    ) -> None:
        self.step, self.ranks, self.params, self.num_ranks = step, tuple(ranks), tuple(params), num_ranks
        self.bucket, self.num_buckets = bucket, num_buckets
        self.elsewhere = tuple((tuple(names), tuple(others)) for names, others in elsewhere)
        where = "on any rank" if len(self.ranks) == num_ranks else f"on {rank_list(self.ranks)} of {num_ranks} ranks"
        shown = [f"; {name_list(names)} got none on {rank_list(others)}" for names, others in self.elsewhere[:_GROUPS_SHOWN]]
        hidden = sum(len(names) for names, _ in self.elsewhere[_GROUPS_SHOWN:])
        more = "".join(shown) + (f"; and {hidden} more" if hidden else "")
        super().__init__(
            f"step {step}: {name_list(self.params)} got no gradient {where} (first in bucket {bucket} of {num_buckets}, "
            f"counted from 0){more}. They require grad but were in no forward of the step that was differentiated; without "
            "them the mean would be of other things than it says. Freeze them with requires_grad_(False) before wrapping, use "
            f"them, or set unused_parameters='zero' to reduce zeros in their place. {_DROPPED}"
        )


class NonFiniteGradientError(MegabucketError, ArithmeticError):
    """A gradient holds nan or inf: before its reduction, which would spread it to every rank, or because of it."""

    def __init__(
        self, *, step: int, rank: int | None, param: str, bucket: int, num_buckets: int, finding: str, num_others: int = 0
    ) -> None:
        self.step, self.rank, self.param, self.finding, self.num_others = step, rank, param, finding, num_others
        self.bucket, self.num_buckets = bucket, num_buckets
        others = f" (and {num_others} more parameters)" if num_others else ""
        whose, why, remedy = (
            f"on rank {rank}",
            "Reduced, it would reach every rank",
            "Look at the loss and the data of that rank",
        )
        if rank is None:  # nobody's alone
            whose, why = "summed over all ranks", "Each rank's part is finite, but 16 bits do not hold their sum"
            remedy = "Reduce in float32 (grad_reduce_in_fp32=True, the default) or make the loss smaller"
        super().__init__(
            f"step {step}: the gradient of {param!r} {whose} (bucket {bucket} of {num_buckets}, counted from 0) has "
            f"{finding}{others}. {why}. No optimizer step was taken on any rank. {remedy}; set "
            "nonfinite_gradients='skip_step' to leave such steps out, or 'allow' where a loss scaler looks at the gradients "
            f"itself. {_DROPPED}"
        )


class ModelChangedError(MegabucketError, RuntimeError):
    """The module is no longer the one that was wrapped."""


class StorageMovedError(ModelChangedError):
    """A parameter no longer lives in its buffer, so what the optimizer updates is not what the module computes with."""

    def __init__(self, *, step: int, rank: int, params: Sequence[str], found: str, expected: str) -> None:
        self.step, self.rank, self.params, self.found, self.expected = step, rank, tuple(params), found, expected
        super().__init__(
            f"step {step}: on rank {rank} parameters have left the buffer: {name_list(self.params)} (the first one is {found}, "
            f"expected {expected}). Something moved parameters after wrapping: "
            ".to(), .half(), .bfloat16(), load_state_dict(assign=True) or `param.data =`. The optimizer would go on updating "
            "memory that the module does not read. Convert the module before wrapping and copy values with param.copy_() "
            f"under no_grad(); ddp.rebuild() takes the module as it is now. {_DROPPED}"
        )


class TrainabilityChangedError(ModelChangedError):
    """A parameter was frozen or unfrozen after wrapping."""

    def __init__(self, *, step: int, rank: int, frozen: Sequence[str], unfrozen: Sequence[str]) -> None:
        self.step, self.rank, self.frozen, self.unfrozen = step, rank, tuple(frozen), tuple(unfrozen)
        changes = [
            f"{name_list(names)} {what}" for names, what in ((self.frozen, "frozen"), (self.unfrozen, "unfrozen")) if names
        ]
        super().__init__(
            f"step {step}: after wrapping, rank {rank} has {' and '.join(changes)} (requires_grad). A frozen parameter keeps "
            "its place in the buffer and gets no gradient; the gradient of an unfrozen one is never reduced, and replicas "
            f"drift apart. Call ddp.rebuild() on every rank after changing requires_grad. {_DROPPED}"
        )


class ParametersChangedError(ModelChangedError):
    """Parameters or submodules were added, removed or replaced after wrapping."""

    def __init__(self, *, step: int, rank: int, added: Sequence[str], removed: Sequence[str], replaced: Sequence[str]) -> None:
        self.step, self.rank = step, rank
        self.added, self.removed, self.replaced = tuple(added), tuple(removed), tuple(replaced)
        changes = [
            f"{what} {name_list(names)}"
            for what, names in (("added", self.added), ("removed", self.removed), ("replaced", self.replaced))
            if names
        ]
        super().__init__(
            f"step {step}: after wrapping, rank {rank} has {' and '.join(changes)}. Gradients of parameters that are not in "
            "the buffers are never reduced, and the optimizer still holds the old ones. Call ddp.rebuild() on every rank "
            f"after changing the module. {_DROPPED}"
        )


class DetachedGradError(ModelChangedError):
    """A parameter's ``main_grad`` is not its place in the gradient buffer."""

    def __init__(self, *, step: int, rank: int, params: Sequence[str]) -> None:
        self.step, self.rank, self.params = step, rank, tuple(params)
        super().__init__(
            f"step {step}: on rank {rank} main_grad of {name_list(self.params)} is no longer the place in the gradient "
            "buffer, so what is added there is in no reduction. Something assigned or deleted it after wrapping. Write into "
            f"main_grad in place (main_grad.copy_(), .add_()), and clear gradients with ddp.zero_grad(). {_DROPPED}"
        )


class PeerFailedError(MegabucketError, RuntimeError):
    """A rank could not finish the step: an exception on it, or its caller gave up."""

    def __init__(self, *, step: int, rank: int, phase: str, cause: str) -> None:
        self.step, self.rank, self.phase, self.cause = step, rank, phase, cause
        consequence = _AFTER_FAILURE.get(phase, _DROPPED)
        where = "" if phase in _MISMATCHES else f"step {step}: "
        super().__init__(f"{where}rank {rank} failed in {phase}: {cause}{'' if cause.endswith('.') else '.'} {consequence}")
