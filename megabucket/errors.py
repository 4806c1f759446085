"""All errors of this library, its log notices, and the formatting of names, ranks and values in texts.

Each error has its facts as attributes, so tests and tools need not parse text; the text says what happened with names and
values, why it matters, and what to do. All errors pickle, so they cross process boundaries.

::

    MegabucketError
    ├── ConfigError (ValueError)               a config that cannot be honoured
    ├── LayoutError (ValueError)               parameters or numbers a layout cannot be built from
    ├── UnsupportedParameterError (ValueError) a parameter the buffers cannot hold
    ├── NoTrainableParametersError (ValueError)
    ├── AlreadyWrappedError (ValueError)       a parameter that another wrapper holds
    ├── ForeignWrapperError (ValueError)       a wrapper of another library inside or around the module
    ├── OptimizerParametersError (ValueError)  optimizer and wrapper disagree about the parameters
    ├── ProcessGroupMissingError (RuntimeError)
    ├── RanksDisagreeError (RuntimeError)      the ranks are not doing the same
    │   ├── LayoutMismatchError                different models, optimizers, configs or versions when wrapping
    │   ├── CallMismatchError                  different calls of this library at the same time
    │   ├── StepMismatchError                  a rank skipped or dropped a step
    │   ├── MicrobatchMismatchError            different numbers of backwards in a step
    │   ├── ScheduleMismatchError              different collectives for the same step
    │   ├── HyperparameterMismatchError        different learning rates, say, before an update
    │   └── ReplicasDivergedError              different optimizer updates, or different weights
    ├── PhaseError (RuntimeError)              an operation in a phase where it is not allowed
    │   ├── LateGradientError                  a gradient for a bucket that was already sent
    │   ├── DelayedGradientError               a gradient computed apart from backward that is missing or wrong
    │   ├── ConcurrentBackwardError            two backwards of one wrapper at the same time
    │   └── UnreducedGradientsError            an optimizer step without a gradient sync before it
    ├── UnusedParameterError (RuntimeError)    a parameter without a gradient at the gradient sync
    ├── NonFiniteGradientError (ArithmeticError) nan or inf in a gradient
    ├── ModelChangedError (RuntimeError)       the module is not the one that was wrapped
    │   ├── StorageMovedError                  a parameter that no longer lives in its buffer
    │   ├── TrainabilityChangedError           frozen or unfrozen after wrapping
    │   ├── ParametersChangedError             parameters added, removed or replaced after wrapping
    │   └── DetachedGradError                  a main_grad that is not the place in the buffer
    ├── PeerFailedError (RuntimeError)         a rank could not finish the step
    ├── PeerLostError (RuntimeError)           a rank died or froze
    ├── WrapperBrokenError (RuntimeError)      a rank stopped where the others could only go on
    ├── UpdateFailedError (RuntimeError)       an optimizer has failed on a whole parameter
    ├── ForkedProcessError (RuntimeError)      a collective in a forked child
    ├── GroupDestroyedError (RuntimeError)     the process group is gone
    ├── PlainOptimizerError (RuntimeError)     a plain optimizer stepping on reduce-scattered gradients
    ├── CollectiveError (RuntimeError)         a collective that cannot give the right result
    ├── CheckpointError (RuntimeError)         a checkpoint that cannot be written or read
    │   ├── CheckpointNotSavedError            a save that failed on some rank
    │   ├── CheckpointInvalidError             files that have changed since they were written
    │   ├── CheckpointMissingError             no such checkpoint
    │   └── CheckpointMismatchError            a checkpoint of another model
    ├── CheckpointUnavailableError (RuntimeError) flat shards asked for as the state of a model
    └── InvariantError (RuntimeError)          a bug of ours
"""

from __future__ import annotations

import copy
import copyreg
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

from typing_extensions import Self

_NAMES_SHOWN: Final = 5
_VALUES_SHOWN: Final = 8


@lru_cache(maxsize=1000)
def log_once(text: str, level: int = logging.WARNING) -> None:
    """Log a notice to the logger ``megabucket``, once per process and text.

    Not a Python warning: a program may turn warnings into errors and stop one rank while others wait.
    """
    logging.getLogger("megabucket").log(level, "megabucket: %s", text)


def name_list(names: Sequence[str]) -> str:
    """Return the first five names, quoted, and the count of the others.

    >>> name_list(["a", "b"])
    "'a', 'b'"
    >>> name_list([str(i) for i in range(7)])
    "'0', '1', '2', '3', '4' and 2 more"
    """
    return _first_few([repr(name) for name in names])


def _first_few(words: Sequence[str]) -> str:
    hidden = len(words) - _NAMES_SHOWN
    return ", ".join(words[:_NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as words, the first five and the count of the others.

    >>> rank_list([1]), rank_list([0, 2]), rank_list(range(8))
    ('rank 1', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4 and 3 more')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_first_few([str(rank) for rank in ranks])}"


def values_by_rank(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Return the ranks of each value, the rarest value last; of many values the most common ones.

    Args:
        ranks: of the values; ``None``: counted from 0.

    >>> values_by_rank([2, 1, 2])
    '2 on ranks 0, 2; 1 on rank 1'
    >>> values_by_rank(range(1024)).partition("; 7 ")[2]
    'on rank 7; others on ranks 8, 9, 10, 11, 12 and 1011 more'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        ranks_of.setdefault(str(value), []).append(rank)
    most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    texts = [f"{value} on {rank_list(ranks)}" for value, ranks in most_first[:_VALUES_SHOWN]]
    if hidden := [rank for _, ranks in most_first[_VALUES_SHOWN:] for rank in ranks]:
        texts.append(f"others on {rank_list(hidden)}")
    return "; ".join(texts)


def printable(text: str, max_chars: int = 200) -> str:
    r"""Return ``text`` with every character that does not print escaped, cut to ``max_chars`` characters.

    Control characters, line breaks and direction marks in a name could otherwise rewrite what a terminal shows.

    >>> printable("a" + chr(27) + "[31m")
    'a\\x1b[31m'
    >>> printable("abcdefgh", 6)
    'abc...'
    """
    # Escapes only lengthen the text, so the rest would be cut off anyway.
    head = text[: max_chars + 1]
    if not head.isprintable():
        head = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in head)
    return head if len(head) <= max_chars else head[: max_chars - 3] + "..."


def quoted(text: str, max_chars: int = 60) -> str:
    """Return ``text`` in quotes, printable and short."""
    return f"'{printable(text, max_chars)}'"


class MegabucketError(Exception):
    """Base of all errors raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields: constructors take keywords only, which the default protocol cannot call."""
        return copyreg.__newobj__, (type(self), *self.args), dict(self.__dict__)  # type: ignore[attr-defined]

    def copy(self) -> Self:
        """Return an equal error without a traceback, to be raised a second time."""
        return copy.copy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the class name, the text and the fields as plain data."""
        return {"error": type(self).__name__, "message": str(self), **self.__dict__}


# Input: configs, models, optimizers, files #


class ConfigError(MegabucketError, ValueError):
    """A config that cannot be honoured; the text lists all problems."""

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message)


class LayoutError(MegabucketError, ValueError):
    """Parameters, sizes or indices that no layout can be built from."""


class UnsupportedParameterError(MegabucketError, ValueError):
    """A parameter the buffers cannot hold."""

    def __init__(self, *, param: str, reason: str, remedy: str) -> None:
        self.param, self.reason, self.remedy = param, reason, remedy
        super().__init__(f"parameter {param!r} cannot live in a parameter and gradient buffer: {reason}. {remedy}")


class NoTrainableParametersError(MegabucketError, ValueError):
    """The module has nothing to reduce."""

    def __init__(self, *, module: str, frozen: Sequence[str]) -> None:
        self.module, self.frozen = module, tuple(frozen)
        found = f"its {len(frozen)} parameters are all frozen ({name_list(frozen)})" if frozen else "it has none at all"
        super().__init__(
            f"{module} has no parameter with requires_grad=True: {found}, so there is nothing to reduce. "
            "Call requires_grad_(True) on what should be trained before wrapping, or use the module without a wrapper."
        )


class AlreadyWrappedError(MegabucketError, ValueError):
    """Two wrappers would own the gradients of one parameter."""

    def __init__(self, *, params: Sequence[str]) -> None:
        self.params = tuple(params)
        super().__init__(
            f"{name_list(self.params)} already belong to another DistributedDataParallel wrapper: they have a main_grad. Two "
            "of them would move the same storage and reduce the same gradients twice. Wrap each parameter once: call detach() "
            "on the first wrapper before wrapping again; if it is Megatron-Core's, build the model anew without it."
        )


class ForeignWrapperError(MegabucketError, ValueError):
    """A data-parallel wrapper of another library, inside or around the module, would own the same gradients."""

    def __init__(self, *, owner: str, where: str, params: Sequence[str], remedy: str) -> None:
        self.owner, self.where, self.params = owner, where, tuple(params)
        super().__init__(
            f"{owner}, {where}, owns the gradients of {name_list(self.params)} as well. Each of the two would reduce gradients "
            f"that the other one has reduced, or still has to, and weights would be wrong without any other error. {remedy}"
        )


class OptimizerParametersError(MegabucketError, ValueError):
    """The optimizer's parameters are not the wrapper's."""

    def __init__(self, *, problem: str, params: Sequence[str], remedy: str) -> None:
        self.problem, self.params = problem, tuple(params)
        super().__init__(f"{problem}: {name_list(self.params)}. {remedy}")


class ProcessGroupMissingError(MegabucketError, RuntimeError):
    """Several processes were launched but cannot communicate."""

    def __init__(self, *, world_size: int) -> None:
        self.world_size = world_size
        super().__init__(
            f"this process is one of {world_size} (WORLD_SIZE={world_size}) but torch.distributed is not initialized, so "
            "each of them would train alone and the replicas would drift apart. Call "
            "torch.distributed.init_process_group() before wrapping the module, or pass process_group=. If this process is to "
            "train alone, unset WORLD_SIZE."
        )


class PlainOptimizerError(MegabucketError, RuntimeError):
    """A plain torch optimizer stepping on parameters whose gradients were reduce-scattered."""

    def __init__(self, *, optimizer: str, params: Sequence[str], rank: int) -> None:
        self.optimizer, self.params, self.rank = optimizer, tuple(params), rank
        super().__init__(
            f"[rank {rank}] {optimizer}.step() would update whole parameters ({name_list(self.params)}), but "
            "use_distributed_optimizer=True reduce-scatters the gradients: this rank holds the reduced values of its own "
            "shard only, and the replicas would drift apart. Wrap the optimizer: megabucket.DistributedOptimizer(optimizer, "
            "ddp), one over all parameters of the wrapper, with groups in place of several optimizers; or set "
            "use_distributed_optimizer=False."
        )


class InvariantError(MegabucketError, RuntimeError):
    """A bug in this library; please report the text."""


# A step: all ranks raise the same error with the same text, which names the rank at fault #

_DROPPED: Final = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
END_OF_STEP: Final = "the end of a step"
"""What a rank is doing, in a ``CallMismatchError``, that is in no collective call."""
_NOTHING_CHANGED: Final = "Nothing was changed on any rank."
# By collective call: what ranks compare in it, and the consequence if it differs or a rank fails.
_CALLS: Final = {
    "wrap": ("the model", "No rank was wrapped."),
    "groups=": ("groups=", "No rank was wrapped."),
    "DistributedOptimizer()": ("the optimizer", "The optimizer was changed on no rank."),
    "ChainedOptimizer()": ("the list of chained optimizers", _NOTHING_CHANGED),
    "rebuild": (
        "the module to rebuild",
        "Repair it and call ddp.rebuild() again on every rank; parameters, moments and main parameters are kept.",
    ),
    "param_norms()": ("the list of parameters", "No norm was computed."),
    "broadcast_params()": ("the module", "Nothing was copied on any rank."),
    "check_replicas()": ("the module", "Nothing was compared."),
    "export_weights()": ("the call", "The export is over on all ranks."),
    "import_weights()": ("the call", "Nothing was written on any rank."),
    "AgreedStop.poll()": ("the call", _NOTHING_CHANGED),
    "start_param_sync()": ("the call", _NOTHING_CHANGED),
    "train()": ("the optimizer", "The weights were switched on no rank."),
    "eval()": ("the optimizer", "The weights were switched on no rank."),
    "offload()": ("the list of what to give back", "No rank has given back anything."),
    "onload()": ("the list of what to take back", "No rank has taken back anything."),
    "state_dict()": ("the state to save", _NOTHING_CHANGED),
    "save_checkpoint()": ("the state to save", "Nothing was saved."),
    "load_state_dict()": ("the optimizer state to load", "Nothing was loaded on any rank."),
    "finalize_grads()": (
        "the argument of finalize_grads()",
        "Gradients of copies are not added up: drop the step with zero_grad() on every rank.",
    ),
}
_SAME_HYPERPARAMETERS: Final = (
    "Set them alike on every rank: look for a scheduler that follows a local loss, for scale_gradients() with a local count, "
    "for a loss scale or max_norm of one rank, for an optimizer's checkpoint that was loaded on one rank only."
)
# Why weights differ.
_USUAL_CAUSES: Final = {
    "update": "Every rank must step after every sync: look for an exception caught around optimizer.step() on one rank.",
    "values": (
        "Look for an exception caught around optimizer.step() on one rank, for parameters written in place or loaded on one "
        "rank, and for a device that computes wrong."
    ),
    "hyperparameters": f"Each rank has updated them in its own way. {_SAME_HYPERPARAMETERS}",
    "load": (
        "Load on every rank, or call ddp.broadcast_params() on every rank right after a load on the first; a rank that loads "
        "weights only to look at them does so in a copy: copy.deepcopy(ddp.module)."
    ),
}


_THE_SAME: Final = "the same model, optimizer, state, config and versions"


class RanksDisagreeError(MegabucketError, RuntimeError):
    """The ranks are not doing the same, so a reduction would mix unrelated values."""


class LayoutMismatchError(RanksDisagreeError):
    """Ranks wrap different models or optimizers, or with different configs or versions.

    Args:
        group: of several, the one whose ranks were compared.
        ranks: that it joins.
    """

    def __init__(
        self,
        *,
        differences: Sequence[str],
        num_different: int,
        num_entries: int,
        phase: str = "wrap",
        group: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        self.differences, self.num_different, self.num_entries = tuple(differences), num_different, num_entries
        self.phase, self.group, self.ranks = phase, group, tuple(ranks)
        hidden = num_different - len(self.differences)
        more = f"; and {hidden} more" if hidden > 0 else ""
        what, consequence = _CALLS[phase]
        where, remedy = "on all ranks", f"Give every rank {_THE_SAME}, in the same order."
        if group:
            where = f"on the ranks that {group} joins ({rank_list(self.ranks)})"
            remedy = (
                f"If these ranks are not to hold the same, {group} joins the wrong ones: pass the ranks that hold the same "
                f"parameters in groups=. Otherwise give them {_THE_SAME}, in the same order."
            )
        elif phase == "groups=":
            remedy = "Every rank that a group joins must pass the same ranks and settings for it."
        super().__init__(
            f"{what} is not the same {where}: {'; '.join(self.differences)}{more} "
            f"({num_different} of {num_entries} entries differ). Values that do not belong together would be mixed. "
            f"{remedy} {consequence}"
        )

    def inside(self, group: str, ranks: Sequence[int]) -> LayoutMismatchError:
        """Return this error as one about the ranks of a group."""
        return LayoutMismatchError(
            differences=self.differences,
            num_different=self.num_different,
            num_entries=self.num_entries,
            phase=self.phase,
            group=group,
            ranks=ranks,
        )


class CallMismatchError(RanksDisagreeError):
    """Ranks are in different collective calls at the same time."""

    def __init__(self, *, step: int, by_rank: Sequence[str]) -> None:
        self.step, self.by_rank = step, tuple(by_rank)
        dropped = " the step was dropped on all ranks," * (END_OF_STEP in self.by_rank)
        super().__init__(
            f"step {step}: ranks are in different calls: {values_by_rank(self.by_rank)}. Each of them needs every rank: make "
            "it on all, at the same place of the program (usual causes: `if rank == 0:` around one, and an exception caught "
            f"on one rank). None of these calls has done anything,{dropped} and the next call of all ranks may run."
        )


class StepMismatchError(RanksDisagreeError):
    """A rank skipped or dropped a step that others are in."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[int]) -> None:
        self.step, self.what, self.by_rank = step, what, tuple(by_rank)
        super().__init__(
            f"step {step}: {what} differ between ranks: {values_by_rank(self.by_rank)}. Some rank has skipped or dropped a "
            "step that others have taken, so batches of different steps would be averaged. Make every rank take every step: a "
            "rank that cannot use its batch, or that catches an exception, calls abort_step() or ddp.zero_grad(), and all drop "
            "the step together (torch's optimizer.zero_grad() does not tell the wrapper). A forward that is not for training "
            f"belongs under torch.no_grad() or module.eval(). {_DROPPED}"
        )


class MicrobatchMismatchError(RanksDisagreeError):
    """Ranks accumulated different numbers of backwards in one step."""

    def __init__(self, *, step: int, by_rank: Sequence[int]) -> None:
        self.step, self.by_rank = step, tuple(by_rank)
        super().__init__(
            f"step {step}: microbatch counts differ between ranks: {values_by_rank(self.by_rank)}. The mean would weigh "
            f"them unequally. Run as many backwards per step on every rank, all but the last one inside no_sync(). {_DROPPED}"
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
    """Ranks were about to update with different learning rates or other hyperparameters."""

    def __init__(self, *, step: int, what: str, by_rank: Sequence[float | str]) -> None:
        self.step, self.what, self.by_rank = step, what, tuple(by_rank)
        super().__init__(
            f"step {step}: hyperparameters differ between ranks: {what} is {values_by_rank(self.by_rank)}. Each rank would "
            f"update its shard differently, which gathered weights do not show. {_SAME_HYPERPARAMETERS} No rank has updated. "
            f"{_DROPPED}"
        )


class ReplicasDivergedError(RanksDisagreeError):
    """The replicas do not hold the same weights any more."""

    def __init__(
        self,
        *,
        step: int,
        what: str,
        by_rank: Sequence[float | str],
        usual_cause: str = "update",
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.step, self.what, self.by_rank, self.usual_cause = step, what, tuple(by_rank), usual_cause
        self.ranks = tuple(range(len(self.by_rank)) if ranks is None else ranks)
        super().__init__(
            f"step {step}: {what} differ between ranks: {values_by_rank(self.by_rank, self.ranks)}. The replicas do not hold "
            f"the same weights any more, and gradients of different models would be averaged. {_USUAL_CAUSES[usual_cause]} "
            "Load the last checkpoint on every rank, or call ddp.broadcast_params() and make the optimizer anew."
        )


class PhaseError(MegabucketError, RuntimeError):
    """An operation in a phase where it is not allowed."""


def refuse_copies(text: str) -> Callable[[Any, Any], NoReturn]:
    """Return a ``__reduce_ex__`` for classes whose objects cannot be copied or pickled.

    Args:
        text: of the error; ``{}`` becomes the name of the class.
    """

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:  # noqa: ARG001, N807 - it becomes a method
        """Refuse to be copied or pickled.

        Raises:
            PhaseError: always.
        """
        raise PhaseError(text.format(type(self).__name__))

    return __reduce_ex__


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


class DelayedGradientError(PhaseError):
    """A gradient computed apart from backward is missing, came too often, or came through autograd."""

    def __init__(self, *, step: int, rank: int, params: Sequence[str], finding: str) -> None:
        self.step, self.rank, self.params, self.finding = step, rank, tuple(params), finding
        super().__init__(
            f"step {step}: on rank {rank} the delayed gradient of {name_list(self.params)} {finding}. Gradients of parameters "
            "with skip_backward_post_hook=True are computed apart from backward: call ddp.grad_ready(param) for each once per "
            "backward, before finish_grad_sync() or the optimizer's step. In backward return None for it, or a dummy with "
            f"param.grad_added_to_main_grad = True. Remove the attribute before wrapping if autograd computes it. {_DROPPED}"
        )


class ConcurrentBackwardError(PhaseError):
    """Two backwards of one wrapper run at the same time: in two threads, or one inside a hook of the other."""

    def __init__(self, *, rank: int, thread: str, other_thread: str) -> None:
        self.rank, self.thread, self.other_thread = rank, thread, other_thread
        super().__init__(
            f"[rank {rank}] thread {thread!r} runs a backward while one of thread {other_thread!r} is still running. Both add "
            "into the same gradient buffer, so the sums would depend on timing. Run one backward at a time: those of several "
            "threads under a lock or with a wrapper each, one that begins inside another (in a hook) after it."
        )


class UnreducedGradientsError(PhaseError):
    """The optimizer was called to step while gradients are still local."""

    def __init__(self, *, rank: int, in_backward: bool = False) -> None:
        self.rank = rank
        if in_backward:
            super().__init__(
                "step() was called during backward, by a hook that steps as soon as a gradient has come. Gradients are reduced "
                "later: a hook must not step, because each rank would update with its own gradient. Call step() after backward."
            )
            return
        super().__init__(
            "step() was called, but the gradients are not reduced: since the last step or zero_grad(), no backward has run "
            "outside no_sync(), or finish_grad_sync() was not called where the config leaves that to the caller "
            "(finish='explicit'). Run the last backward of the step outside no_sync(), or call finish_grad_sync() yourself; "
            "clear gradients after step(), not before. To step on the gradients of one rank alone (local SGD), use the module "
            "without a wrapper."
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
    ) -> None:
        self.step, self.ranks, self.params, self.num_ranks = step, tuple(ranks), tuple(params), num_ranks
        self.bucket, self.num_buckets = bucket, num_buckets
        where = "on any rank" if len(self.ranks) == num_ranks else f"on {rank_list(self.ranks)} of {num_ranks} ranks"
        super().__init__(
            f"step {step}: {name_list(self.params)} got no gradient {where} (first in bucket {bucket} of {num_buckets}, "
            f"counted from 0). They require grad but no backward of the step reached them, or their .grad was set to None (by "
            "a hook, or between two backwards). Freeze them with "
            "requires_grad_(False) before wrapping, use them, or set unused_parameters='skip', which is torch DDP's "
            "find_unused_parameters=True, or 'zero' to reduce zeros in their place. "
            f"{_DROPPED}"
        )


class NonFiniteGradientError(MegabucketError, ArithmeticError):
    """A gradient holds nan or inf: before its reduction, which would spread it to every rank, or because of it."""

    def __init__(
        self, *, step: int, rank: int | None, param: str, bucket: int, num_buckets: int, finding: str, num_others: int = 0
    ) -> None:
        self.step, self.rank, self.param, self.finding, self.num_others = step, rank, param, finding, num_others
        self.bucket, self.num_buckets = bucket, num_buckets
        others = f" (and {num_others} more parameters)" if num_others else ""
        if rank is None:  # of no rank alone
            whose, why = "summed over all ranks", "Each rank's part is finite, but 16 bits do not hold their sum"
            remedy = "Reduce in float32 (grad_reduce_in_fp32=True, the default) or make the loss smaller"
        else:
            whose, why = f"on rank {rank}", "Reduced, it would reach every rank"
            remedy = "Look at the loss and the data of that rank"
        super().__init__(
            f"step {step}: the gradient of {param!r} {whose} (bucket {bucket} of {num_buckets}, counted from 0) has "
            f"{finding}{others}. {why}. No optimizer step was taken on any rank. {remedy}; set "
            "nonfinite_gradients='skip_step' to skip such steps, or 'allow' with a loss scaler such as torch.amp.GradScaler. "
            f"{_DROPPED}"
        )


class ModelChangedError(MegabucketError, RuntimeError):
    """The module is no longer the one that was wrapped."""


def _changes(**names_of: Sequence[str]) -> str:
    return " and ".join(f"{change} {name_list(names)}" for change, names in names_of.items() if names)


class StorageMovedError(ModelChangedError):
    """A parameter is no longer in its buffer, so the optimizer updates memory that the module does not read."""

    def __init__(self, *, step: int, rank: int, params: Sequence[str], found: str, expected: str) -> None:
        self.step, self.rank, self.params, self.found, self.expected = step, rank, tuple(params), found, expected
        super().__init__(
            f"step {step}: on rank {rank} parameters have left the buffer: {name_list(self.params)} (the first one is {found}, "
            f"expected {expected}). Something moved parameters after wrapping: .to(), .half(), .bfloat16(), "
            "load_state_dict(assign=True) or `param.data =`. The optimizer would go on updating memory that the module does "
            "not read. Convert the module before wrapping and copy values with param.copy_() under no_grad(); ddp.rebuild() "
            f"takes the module as it is now. {_DROPPED}"
        )


class TrainabilityChangedError(ModelChangedError):
    """A parameter was frozen or unfrozen after wrapping."""

    def __init__(self, *, step: int, rank: int, frozen: Sequence[str], unfrozen: Sequence[str]) -> None:
        self.step, self.rank, self.frozen, self.unfrozen = step, rank, tuple(frozen), tuple(unfrozen)
        changes = _changes(frozen=self.frozen, unfrozen=self.unfrozen)
        for_a_while = (
            " To freeze them for a while, as the halves of a GAN in turn, wrap with unused_parameters='skip', or each half by "
            "itself, and unfreeze it before its optimizer steps. check_model_changes=False leaves the check out."
            if self.frozen and not self.unfrozen
            else ""
        )
        super().__init__(
            f"step {step}: after wrapping, rank {rank} has {changes} (requires_grad). A frozen parameter keeps "
            "its place in the buffer and gets no gradient; the gradient of an unfrozen one is never reduced, and replicas "
            f"drift apart. Call ddp.rebuild() on every rank after changing requires_grad.{for_a_while} {_DROPPED}"
        )


class ParametersChangedError(ModelChangedError):
    """Parameters or submodules were added, removed or replaced after wrapping."""

    def __init__(self, *, step: int, rank: int, added: Sequence[str], removed: Sequence[str], replaced: Sequence[str]) -> None:
        self.step, self.rank = step, rank
        self.added, self.removed, self.replaced = tuple(added), tuple(removed), tuple(replaced)
        changes = _changes(added=self.added, removed=self.removed, replaced=self.replaced)
        super().__init__(
            f"step {step}: after wrapping, rank {rank} has {changes}. Gradients of parameters that are not in "
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
        where, consequence = f"step {step}: ", _DROPPED
        if phase in _CALLS:
            where, consequence = "", _CALLS[phase][1]
        elif phase == "optimizer":
            consequence = "Its shard of the parameters may miss part of the update: load the last checkpoint on every rank."
        super().__init__(f"{where}rank {rank} failed in {phase}: {cause}{'' if cause.endswith('.') else '.'} {consequence}")


# Ranks and collectives #


class PeerLostError(MegabucketError, RuntimeError):
    """A rank died, froze, or did not arrive in time. The process group cannot be used any more."""

    def __init__(self, *, ranks: Sequence[int], states: Sequence[str], during: str) -> None:
        self.ranks, self.states, self.during = tuple(ranks), tuple(states), during
        findings = "; ".join(f"rank {rank} {state}" for rank, state in zip(self.ranks, self.states, strict=True))
        super().__init__(
            f"{findings or 'an unknown rank is lost, or waits in another collective'} ({during}). The process group cannot "
            "be used any more: gradients of this step are lost, parameters are those of the last step. End this process, or "
            "destroy the group, and start again from the last checkpoint with the ranks that are left."
        )


class WrapperBrokenError(MegabucketError, RuntimeError):
    """A rank stopped after its fence was sent, so the ranks are permanently out of step."""

    def __init__(self, *, step: int, rank: int | None, phase: str, cause: str) -> None:
        self.step, self.rank, self.phase, self.cause = step, rank, phase, cause
        who = f"rank {rank} stopped in {phase}, with the others about to go on: " if rank is not None else ""
        super().__init__(
            f"step {step}: {who}{cause}. The wrapper is broken on all ranks: nothing can be sent any more, and parameters may "
            "be of two different steps. On every rank call ddp.detach(), wrap the module again, make the optimizer anew and "
            "load the last checkpoint."
        )


class UpdateFailedError(MegabucketError, RuntimeError):
    """The code of an optimizer has failed on a whole parameter, which no other rank updates."""

    def __init__(self, *, kind: str, rank: int, params: Sequence[str], cause: Exception) -> None:
        self.kind, self.rank, self.params = kind, rank, tuple(params)
        self.param = params[0] if len(params) == 1 else None
        """The parameter, where it is known."""
        where = (
            repr(self.param) if self.param else f"one of the {len(params)} parameters that this rank owns: {name_list(params)}"
        )
        super().__init__(f"[rank {rank}] {kind} has failed to update {where} ({type(cause).__name__}: {cause})")


class ForkedProcessError(MegabucketError, RuntimeError):
    """A forked child used the wrapper of its parent."""

    def __init__(self, *, rank: int, operation: str) -> None:
        self.rank, self.operation = rank, operation
        super().__init__(
            f"[rank {rank}] {operation} in a forked child process. The threads of the process group exist in the parent only, "
            "so this would wait for ever. Train in the process that wrapped the module; start helpers with the 'spawn' "
            "method, or let them work on a copy that was made before the fork (copy.deepcopy(ddp.module))."
        )


class GroupDestroyedError(MegabucketError, RuntimeError):
    """The process group that a wrapper reduces over does not exist any more."""

    def __init__(self, *, rank: int, operation: str) -> None:
        self.rank, self.operation = rank, operation
        super().__init__(
            f"[rank {rank}] {operation}, but the process group of the wrapper was destroyed, so nothing can be reduced any "
            "more and this replica would go on alone. Call ddp.detach() and wrap the module again over a living group; at the "
            "end of a program call ddp.detach() before destroy_process_group()."
        )


class CollectiveError(MegabucketError, RuntimeError):
    """A collective that cannot give the right result."""


# Checkpoints #

_STEPS_SHOWN = 10
_PROBLEMS_SHOWN = 20


def step_list(steps: Sequence[int]) -> str:
    """Return the newest ten steps as words, the newest last.

    >>> step_list([100, 120]), step_list([])
    ('steps 100, 120', 'no step')
    >>> step_list(range(12))
    'steps 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 older ones'
    """
    if not steps:
        return "no step"
    shown = ", ".join(str(step) for step in steps[-_STEPS_SHOWN:])
    hidden = len(steps) - _STEPS_SHOWN
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}" + (f" and {hidden} older ones" if hidden > 0 else "")


class CheckpointError(MegabucketError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class CheckpointNotSavedError(CheckpointError):
    """A save failed on some rank, so nothing was committed, and every rank raises this.

    Args:
        last_good_step: the step that ``latest`` names; -1 when none is known.
    """

    def __init__(self, *, step: int, ranks: Sequence[int], path: str, reason: str, last_good_step: int) -> None:
        self.step, self.ranks, self.path, self.reason = step, tuple(ranks), path, reason
        self.last_good_step = last_good_step
        others = f" ({rank_list(self.ranks[1:])} failed as well)" if len(self.ranks) > 1 else ""
        good = f"the last good checkpoint is that of step {last_good_step}" if last_good_step >= 0 else "no good one is known"
        super().__init__(
            f"step {step}: the checkpoint was not saved: rank {self.ranks[0]}: {reason}: {path}{others}. Nothing was committed "
            f"on any rank; {good}. Training may go on; remove the cause and save again."
        )


class CheckpointInvalidError(CheckpointError):
    """The files of a checkpoint have changed since they were written, so nothing of them is used.

    Args:
        file: the file that is wrong, within ``path``.
        steps: what else ``root`` holds that looks whole.
        cause: why it cannot be read; left out, it is damaged.
        remedy: what to do if no other step can be tried, or as well for a ``cause`` that is given.
    """

    def __init__(
        self, *, path: str, file: str, problem: str, steps: Sequence[int] = (), cause: str = "", remedy: str = ""
    ) -> None:
        self.path, self.file, self.problem, self.steps = path, file, problem, tuple(steps)
        others = f"{step_list(self.steps)} can be tried: name one as the step to read" if steps else ""
        remedies = [one for one in (remedy, others) if one] or ["Restore it from a copy"]
        cause = cause or "The file was damaged or changed after it was written, or is not a checkpoint of this library"
        super().__init__(f"{path}: {file}: {problem}. {cause}; nothing of it was loaded. {'; '.join(remedies)}.")


class CheckpointMissingError(CheckpointError):
    """There is no such checkpoint.

    Args:
        steps: what ``root`` holds that looks whole.
    """

    def __init__(self, *, root: str, wanted: str, steps: Sequence[int]) -> None:
        self.root, self.wanted, self.steps = root, wanted, tuple(steps)
        found = f"It holds {step_list(self.steps)}: name one." if steps else "It holds no checkpoint at all: check the path."
        super().__init__(f"{root}: no checkpoint for {wanted}. {found}")


class CheckpointMismatchError(CheckpointError):
    """A complete checkpoint of other objects than those to restore; the text lists up to twenty problems."""

    def __init__(self, *, path: str, problems: Sequence[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        shown = "\n".join(f"  - {problem}" for problem in self.problems[:_PROBLEMS_SHOWN])
        hidden = len(self.problems) - _PROBLEMS_SHOWN
        super().__init__(
            f"{path} does not fit, and nothing was changed:\n{shown}" + (f"\n  and {hidden} more" if hidden > 0 else "")
        )


class CheckpointUnavailableError(MegabucketError, RuntimeError):
    """Optimizer state was asked for in a form that one rank cannot give."""

    def __init__(self, *, optimizer: str, method: str, rank: int, num_shards: int) -> None:
        self.optimizer, self.method, self.rank, self.num_shards = optimizer, method, rank, num_shards
        instead = method if method.endswith("()") else "state_dict()"
        super().__init__(
            f"[rank {rank}] {method} of the {optimizer} inside a DistributedOptimizer would find no state: it is in flat "
            f"shards (1 of {num_shards} on this rank). Call {instead} of the DistributedOptimizer on every rank: it has whole "
            "parameters, in torch's format."
        )
