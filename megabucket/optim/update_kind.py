"""Finds how an optimizer updates: each element by itself, each parameter by itself, or one depending on others.

It decides which tensors the optimizer may step on when its work is divided among ranks. Of some of torch's own classes it is
known. Of others neither the class nor the name tells. So copies of the optimizer step on small tensors of the dimensions that
its groups hold, and the results are compared. The optimizer itself, its parameters and state, and the random number generators
are not changed.

    together   [ a ] [ b ] [ c ]      all of them in one optimizer
    alone      [ a ]                  each in an optimizer of its own: another result means COUPLED
    changed    [ a'] [ b'] [ c']      other gradients for some elements: another result for the rest means TENSOR
    cut        [ a b|b c ]            flat pieces across them: another result, or an exception, means TENSOR
"""

from __future__ import annotations

import copy
import enum
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, NoReturn

import torch

from megabucket.errors import ConfigError
from megabucket.optim.param_state import is_per_element
from megabucket.optim.state_dict import AS_PLAIN
from megabucket.optim.updates import unhooked_step


class UpdateKind(enum.Enum):
    """On what the update of one element depends."""

    ELEMENTWISE = "elementwise"  # on this element only: may step on flat shards cut across parameters
    TENSOR = "tensor"  # on its whole parameter (Muon, LAMB, Adafactor, Shampoo, SOAP): needs whole tensors
    COUPLED = "coupled"  # on other parameters (Prodigy, a global clip inside): needs all of them


class FoundKind(NamedTuple):
    """How an optimizer updates."""

    kind: UpdateKind
    reason: str
    """For the text of an error: the evidence of the dependence. Empty for ELEMENTWISE."""


_ELEMENTWISE: Final = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
_TENSOR: Final = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""Classes that update so in every torch from 2.11 on. A subclass is tried."""

_Shapes = tuple[tuple[int, ...], ...]
_Cut = Callable[[torch.Tensor], list[torch.Tensor]]
"""Makes the tensors of a group of the flat values of all of them."""


class _Course(NamedTuple):
    """The steps of one copy."""

    lr: float
    grad_scales: tuple[float, ...]  # by step
    changes: tuple[float, float]  # factors of changed gradients in even and odd steps
    num_finite: int  # of the first steps must give finite values; behind an overflow nothing is compared


# Gradients that grow suddenly trigger clipping inside an optimizer. The learning rates replace that of the optimizer: a warmup
# may begin at 0, which changes nothing.
_USUAL: Final = _Course(0.01, (1.0, 30.0, 0.3, 1e-3, 1e4), (3.0, -4.0), num_finite=3)
# Prodigy and D-Adaptation begin with updates of 1e-6 and enlarge them, by sums over all parameters, after those have moved far
# in the direction of their gradients: at a large learning rate in a few steps, at 0.01 in hundreds. Large gradients of changing
# sign prevent it.
_SLOW: Final = _Course(4.0, (1.0,) * 12, (30.0, -40.0), num_finite=0)

_DECAY: Final = 0.1
"""Replaces a weight decay of 0 as well: some optimizers look at whole tensors only with weight decay."""
_IN_NO_COMPARISON: Final = frozenset({"params", "param_names", "initial_lr", "lr", "weight_decay"})

_EXACT: Final = 1e-5
"""Relative to the largest update so far. The same operations on tensors of the same shapes give the same bits."""
_STACKED: Final = 0.1
"""The same for matrices of equal shapes. An optimizer may stack them, and products of stacks, often in bfloat16, are rounded in
another way."""
_CUT: Final = 1e-4
"""The same for other shapes, where fused kernels round the last elements of a tensor in another way."""
_MAX_ROUNDED: Final = 1 / 16
"""Of all elements may differ by more than that, up to the precision of the state: those last ones, if state is 16-bit."""

# Numbers of elements are multiples of 64, as are those of pieces: vectorized loops on the CPU then leave no last elements that
# would be rounded in another way. Two parameters have one shape: an optimizer may share state by shape.
_PIECE_NUMEL: Final = 192
_LARGE_PIECE_NUMEL: Final = 19_712


def find_update_kind(optimizer: torch.optim.Optimizer) -> FoundKind:
    """Return how the optimizer updates. ``optimizer.update_kind``, or that of its class, replaces the trial.

    Raises:
        ConfigError: ``update_kind`` is none of the three; the trial fails and there is no ``update_kind``; or the optimizer
            requires a closure or sparse gradients, or keeps float32 copies of the parameters itself.
    """
    _check_is_usable(optimizer)
    kind = type(optimizer).__name__
    declared = getattr(optimizer, "update_kind", None)
    if declared is not None:
        try:
            found = UpdateKind(declared)
        except ValueError:
            choices = ", ".join(repr(choice.value) for choice in UpdateKind)
            raise ConfigError(
                f"{kind} declares update_kind = {declared!r}, which decides on which tensors it steps. Choose one of "
                f"{choices}, or leave it out: then it is tried."
            ) from None
        return FoundKind(found, "" if found is UpdateKind.ELEMENTWISE else f"it declares update_kind = {found.value!r}")
    if type(optimizer) in _ELEMENTWISE:
        return FoundKind(UpdateKind.ELEMENTWISE, "")
    if type(optimizer) in _TENSOR:
        return FoundKind(UpdateKind.TENSOR, f"torch's {kind} computes each update from a whole parameter")
    try:
        return _find_by_trial(optimizer)
    except Exception as error:  # whatever the code of an optimizer raises
        reason = str(error) if isinstance(error, _TrialError) else f"a copy fails with {type(error).__name__}: {error}"
        raise ConfigError(
            f"how {kind} updates could not be tried on small tensors: {reason}. On which tensors it may step depends on that. "
            'Declare it: optimizer.update_kind = "elementwise" if it updates each element by itself, "tensor" if each '
            f"parameter by itself. If one parameter's update depends on others, use {AS_PLAIN.format(kind)}"
        ) from error


def refuse_coupled(optimizer: torch.optim.Optimizer, found: FoundKind) -> NoReturn:
    """Refuse an optimizer that would have to step on all parameters at once.

    Raises:
        ConfigError: always.
    """
    kind = type(optimizer).__name__
    raise ConfigError(
        f"{kind} updates one parameter depending on others: {found.reason}. Here each rank updates only some of the parameters "
        f"(with shards, or experts), so the result would differ from that of {kind} over all of them. Use "
        "use_distributed_optimizer=False, with the same parameters on all ranks. If it does update each parameter by itself, "
        'declare it: optimizer.update_kind = "tensor".'
    )


def _check_is_usable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that cannot step on dense gradients and main parameters, whatever they declare."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"{kind} steps on sparse gradients only, and the buffers hold dense ones, so it cannot update wrapped parameters. "
            "Use Adam."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind}.step() requires a closure and calls it many times, and a DistributedOptimizer steps on one set of "
            f"gradients, which all ranks have agreed on. Use {AS_PLAIN.format(kind)}"
        )
    if getattr(optimizer, "master_weights", None) is True:
        raise ConfigError(
            f"{kind}(master_weights=True) keeps float32 copies of the parameters, and so does a DistributedOptimizer, which "
            "steps on its own: the two would drift apart. Leave master_weights out."
        )


# The trial #


class _TrialError(Exception):
    """Nothing can be concluded from the trial. Becomes a ConfigError."""


@dataclass(frozen=True, slots=True)
class _GroupKind:
    """Groups with the same hyperparameters, which are tried as one."""

    index: int  # of the first such group
    ndims: tuple[int, ...]
    state: Mapping[int, Mapping[str, Any]]
    """Of a parameter that has some, by dimensions; ``_Filled`` for one value per element."""


class _Filled(NamedTuple):
    """Initial values of state with one value per element, all equal."""

    value: float
    dtype: torch.dtype | None  # None: that of the parameter


def _find_by_trial(optimizer: torch.optim.Optimizer) -> FoundKind:
    """Try small tensors first: matrix optimizers, which allocate by the square of a tensor's length, never see the large ones.

    Raises:
        _TrialError: nothing can be concluded.
        Exception: whatever a copy raises when it steps on whole tensors.
    """
    kinds = _group_kinds(optimizer)
    if not kinds:
        return FoundKind(UpdateKind.ELEMENTWISE, "")
    device = next(param.device for group in optimizer.param_groups for param in group["params"])
    with _same_random_numbers(device) as has_drawn, torch.no_grad():
        trial = _Trial(optimizer, kinds, [_shapes(kind.ndims) for kind in kinds], device, _PIECE_NUMEL)
        if reason := trial.find_coupling((_USUAL, _SLOW)):
            if has_drawn():
                raise _TrialError("it draws random numbers, so no two copies agree")
            return FoundKind(UpdateKind.COUPLED, reason)
        if reason := trial.find_whole_tensors((_USUAL, _SLOW)):
            return FoundKind(UpdateKind.TENSOR, reason)
        # Some optimizers treat only large tensors by rows, columns or blocks.
        large = _Trial(optimizer, kinds, [_large_shapes(kind.ndims) for kind in kinds], device, _LARGE_PIECE_NUMEL)
        if reason := large.find_coupling((_USUAL,)):
            return FoundKind(UpdateKind.COUPLED, reason)
        if reason := large.find_whole_tensors((_USUAL,)):
            return FoundKind(UpdateKind.TENSOR, reason)
    return FoundKind(UpdateKind.ELEMENTWISE, "")


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leave the generators of host and device as they were. Yields whether they have changed in between."""
    host = torch.default_generator.clone_state()  # not get_rng_state(): see checkpoint/values.py
    of_device = None if device.type == "cpu" else torch.get_device_module(device)
    before: Any = None if of_device is None else of_device.get_rng_state(device)

    def has_drawn() -> bool:
        on_host = not torch.equal(host.get_state(), torch.default_generator.clone_state().get_state())
        return on_host or (of_device is not None and not torch.equal(before, of_device.get_rng_state(device)))

    try:
        yield has_drawn
    finally:
        torch.default_generator.set_state(host.get_state())
        if of_device is not None:
            of_device.set_rng_state(before, device)


def _shapes(ndims: Sequence[int]) -> _Shapes:
    """Return small ones. Matrices are tall and wide; scalars come last, so the others begin at multiples of 64."""
    some: list[tuple[int, ...]] = []
    for ndim in ndims:
        if ndim == 1:
            some += [(64,), (128,), (64,)]
        elif ndim >= 2:
            ones = (1,) * (ndim - 4)
            tall, wide = {2: ((16, 8), (8, 24)), 3: ((16, 4, 2), (4, 6, 8))}.get(ndim, ((8, 4, 2, 2), (4, 6, 4, 2)))
            some += [tall + ones, wide + ones, tall + ones]
    return (*some, *[()] * (4 if 0 in ndims else 0))


def _large_shapes(ndims: Sequence[int]) -> _Shapes:
    """Return a small tensor before a large one, which then begins within a block of 256 elements of the flat values."""
    some: list[tuple[int, ...]] = [(64,), (5056,)] if 1 in ndims else []
    for ndim in ndims:
        if ndim >= 2:
            some += [(16, 8) + (1,) * (ndim - 2), (144, 136) + (1,) * (ndim - 2)]
    return tuple(some) or ((),) * 4


class _Trial:
    """Copies of one optimizer on tensors of the given shapes, by kind of group.

    Args:
        piece_numel: of a flat piece.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: Sequence[_GroupKind],
        shapes: Sequence[_Shapes],
        device: torch.device,
        piece_numel: int,
    ) -> None:
        self._optimizer, self._kinds, self._shapes, self._device = optimizer, kinds, shapes, device
        self._piece_numel = piece_numel
        self._start = [_start(of, device) for of in shapes]
        self._is_changed = [_is_changed(len(start), device) for start in self._start]
        self._grads: list[list[torch.Tensor]] = []  # by step, of scale 1
        self._together: dict[_Course, list[list[torch.Tensor]]] = {}  # values after each step, by kind of group
        self._rounding = 0.0

    def find_coupling(self, courses: Sequence[_Course]) -> str:
        """Return how a tensor that is alone in its group is updated otherwise than among others; empty if it is not.

        Raises:
            _TrialError: the steps change nothing, or give nan.
        """
        for course in courses:
            together = self._step(course, [_whole(shapes) for shapes in self._shapes])
            self._check_tells(course, together)
            self._together[course] = together
            for index in range(max(map(len, self._shapes))):
                # One tensor in each kind of group, since code may expect that none is empty.
                at = [index % len(shapes) for shapes in self._shapes]
                try:
                    alone = self._step(course, [_only(shapes, at) for shapes, at in zip(self._shapes, at, strict=True)])
                except Exception as error:  # whatever the code of an optimizer raises
                    return (
                        f"a copy of it with one tensor fails ({type(error).__name__}: {error}), and one with several does not"
                    )
                for shapes, start, all_of_them, one, where in zip(self._shapes, self._start, together, alone, at, strict=True):
                    shape, numels = shapes[where], _numels(shapes)
                    ours = [after.split(numels)[where] for after in all_of_them]
                    tolerance = _STACKED if len(shape) > 1 and shapes.count(shape) > 1 else _EXACT
                    if how := _difference(ours, one, start.split(numels)[where], tolerance):
                        return f"on small tensors a parameter of shape {shape} becomes another when it is alone ({how})"
        return ""

    def find_whole_tensors(self, courses: Sequence[_Course]) -> str:
        """Return how the update of an element depends on others of its tensor; empty if it does not. Comes after the other."""
        for course in courses:
            changed = self._step(course, [_whole(shapes) for shapes in self._shapes], changed=True)
            try:
                cut = self._step(course, [_pieces(self._piece_numel)] * len(self._kinds))
            except Exception as error:  # whatever the code of an optimizer raises
                return f"a copy of it fails on flat tensors cut across parameters ({type(error).__name__}: {error})"
            together = self._together[course]
            for shapes, start, mask, whole, other, flat in zip(
                self._shapes, self._start, self._is_changed, together, changed, cut, strict=True
            ):
                of_cut = self._tolerance(start, whole, flat)
                at = 0
                for shape, numel in zip(shapes, _numels(shapes), strict=True):
                    part = slice(at, at := at + numel)
                    same = ~mask[part]
                    ours = [after[part] for after in whole]
                    kept = [after[same] for after in ours]
                    if how := _difference(kept, [after[part][same] for after in other], start[part][same], _EXACT):
                        text = f"elements of a parameter of shape {shape} become others when gradients of the rest change"
                    elif how := _difference(ours, [after[part] for after in flat], start[part], of_cut, ulps=2):
                        text = f"a parameter of shape {shape} becomes another when it is cut and flat"
                    else:
                        continue
                    return f"on small tensors its update of one element depends on others ({text}: {how})"
        return ""

    def _step(self, course: _Course, cuts: Sequence[_Cut], *, changed: bool = False) -> list[list[torch.Tensor]]:
        """Return the flat values after each step of a copy, by kind of group.

        Args:
            cuts: make its tensors, by kind of group.
            changed: some elements get other gradients.
        """
        starts = [cut(start) for cut, start in zip(cuts, self._start, strict=True)]
        tried = _copy_of(self._optimizer, self._kinds, starts, course.lr)
        # A schedule-free optimizer steps in this mode only, and loops may switch it when everything is wrapped.
        getattr(tried, "train", lambda: None)()
        step = unhooked_step(tried)  # hooks for all optimizers of the process need not see copies
        values: list[list[torch.Tensor]] = [[] for _ in cuts]
        for index, scale in enumerate(course.grad_scales):
            if index == len(self._grads):
                self._grads.append([_grads(shapes, index, self._device) for shapes in self._shapes])
            for group, cut, grads, mask in zip(tried.param_groups, cuts, self._grads[index], self._is_changed, strict=True):
                factors = torch.where(mask, course.changes[index % 2], 1.0) if changed else 1.0
                for param, grad in zip(group["params"], cut(grads * factors * scale), strict=True):
                    param.grad = grad.clone()
            step(tried)
            for group, after in zip(tried.param_groups, values, strict=True):
                after.append(torch.cat([param.detach().flatten() for param in group["params"]]))
        self._rounding = max(self._rounding, _coarsest_eps(list(tried.state.values())))
        return values

    def _check_tells(self, course: _Course, together: Sequence[Sequence[torch.Tensor]]) -> None:
        for start, values in zip(self._start, together, strict=True):
            if not all(after.isfinite().all() for after in values[: course.num_finite]):
                raise _TrialError("its steps give nan or infinite values")
            if torch.equal(values[-1], start):
                raise _TrialError(f"{len(course.grad_scales)} steps of a copy change nothing, so there is nothing to compare")

    def _tolerance(self, start: torch.Tensor, whole: Sequence[torch.Tensor], cut: Sequence[torch.Tensor]) -> float:
        """Return by how much cut tensors may differ: by the precision of state, if so few elements do that it is rounding."""
        if not self._rounding:
            return _CUT
        is_off = torch.zeros_like(start, dtype=torch.bool)
        for ours, theirs in zip(whole, cut, strict=True):
            is_off |= (ours - theirs).abs() > _CUT * (ours - start).abs().max()
        return max(_CUT, 4 * self._rounding) if float(is_off.float().mean()) <= _MAX_ROUNDED else _CUT


# What the copies step on #


def _numels(shapes: _Shapes) -> list[int]:
    return [prod(shape) for shape in shapes]


def _whole(shapes: _Shapes) -> _Cut:
    return lambda flat: [part.view(shape) for part, shape in zip(flat.split(_numels(shapes)), shapes, strict=True)]


def _only(shapes: _Shapes, index: int) -> _Cut:
    return lambda flat: [_whole(shapes)(flat)[index]]


def _pieces(numel: int) -> _Cut:
    return lambda flat: list(flat.split(numel))


def _start(shapes: _Shapes, device: torch.device) -> torch.Tensor:
    """Return the values of all tensors before the first step: 1D, float32, some so small that updates of 1e-8 change them."""
    at = torch.arange(sum(_numels(shapes)), dtype=torch.float32, device=device)
    return torch.sin(0.7 * at + 0.1) ** 3 * (1 + 3 * at / len(at))


def _grads(shapes: _Shapes, step: int, device: torch.device) -> torch.Tensor:
    """Return the gradients of one step: 1D, float32, no two of them alike."""
    numels = torch.tensor(_numels(shapes), dtype=torch.int64, device=device)
    at = torch.arange(int(numels.sum()), dtype=torch.float32, device=device)
    # Those of every second tensor change their sign in each step. So estimates of how far gradients lead, by which an optimizer
    # may enlarge its updates even at a fixed rate, differ between one tensor and all.
    turns = torch.arange(len(shapes), dtype=torch.int64, device=device).repeat_interleave(numels) % 2 * (step % 2)
    # Larger from tensor to tensor: with equal maxima, a bound that depends on the largest gradient would be equal everywhere.
    return (torch.cos(1.3 * at) * (1 - 2 * turns) + 0.3 * torch.cos(2.1 * at + step)) * (0.02 + at / len(at))


def _is_changed(numel: int, device: torch.device) -> torch.Tensor:
    """Return which elements get other gradients: some of each row, column and block, whatever the shape."""
    return torch.arange(numel, dtype=torch.int64, device=device) * 7919 % 31 < 12


def _difference(
    ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], start: torch.Tensor, tolerance: float, *, ulps: int = 0
) -> str:
    """Return how values differ after any step; empty if they agree.

    Args:
        ours, theirs: the values after each step.
        start: the values before the first one.
        ulps: of the largest value may be off in any case.
    """
    moved = 0.0
    # Step by step: over all of them, operations on large tensors would start threads, which may wait long on a busy host.
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True) if start.numel() else ()):
        largest = float(our.abs().max())
        if not math.isfinite(largest):
            break
        moved, off = max(moved, float((our - start).abs().max())), float((our - their).abs().max())
        if not off <= tolerance * moved + ulps * torch.finfo(torch.float32).eps * largest:  # nan included
            return f"after step {step + 1} off by {off:.2g}, updated by {moved:.2g}"
    return ""


def _coarsest_eps(values: object) -> float:
    """Return the relative precision of the least precise floating state, as far as it is 16-bit; 0 if all is float32.

    State of 8 bits has scales that several elements share, so a difference is no matter of rounding.
    """
    if isinstance(values, torch.Tensor):
        return torch.finfo(values.dtype).eps if values.dtype in (torch.bfloat16, torch.float16) else 0.0
    if isinstance(values, Mapping):
        values = list(values.values())
    return max(map(_coarsest_eps, values), default=0.0) if isinstance(values, list | tuple) else 0.0


# Copies #


def _group_kinds(optimizer: torch.optim.Optimizer) -> list[_GroupKind]:
    """Return the kinds of groups that hold parameters, with the dimensions of those and state of some."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            own = sorted((key, value) for key, value in group.items() if key not in _IN_NO_COMPARISON)
            groups[repr(own)].append(index)
    kinds = []
    for indices in groups.values():
        params = [param for index in indices for param in optimizer.param_groups[index]["params"]]
        held = [param for param in params if param.numel()] or params
        with_state: dict[int, torch.Tensor] = {}
        for param in sorted(held, key=torch.Tensor.numel, reverse=True):  # small ones do not show what is one value per element
            if optimizer.state.get(param):
                with_state.setdefault(param.ndim, param)
        ndims = tuple(sorted({param.ndim for param in held}))
        kinds.append(_GroupKind(indices[0], ndims, _describe_state(with_state, optimizer.state)))
    return kinds


def _describe_state(params: Mapping[int, torch.Tensor], state: Mapping[torch.Tensor, Any]) -> dict[int, dict[str, Any]]:
    """Return the state that small parameters begin with, by their dimensions; empty if it depends on shapes of large ones.

    Parameters have state already if the constructor initializes it, or after steps before wrapping.
    """
    first: dict[str, Any] = {}  # all begin with the same values, or cut and whole parameters would differ by them
    described: dict[int, dict[str, Any]] = {}
    for ndim, param in params.items():
        for key, value in state[param].items():
            if is_per_element(key, value, param):
                dtype = None if value.dtype == param.dtype else value.dtype
                entry: Any = _Filled(float(value.flatten()[0]), dtype)
            elif (
                value is None or isinstance(value, bool | int | float | str) or (torch.is_tensor(value) and value.numel() == 1)
            ):
                entry = value
            else:
                return {}
            described.setdefault(ndim, {})[key] = first.setdefault(key, entry)
    return described


def _copy_of(
    optimizer: torch.optim.Optimizer, kinds: Sequence[_GroupKind], values: Sequence[Sequence[torch.Tensor]], lr: float
) -> torch.optim.Optimizer:
    """Return a copy over other tensors, with one group of each kind and no hooks. The constructor is not called."""
    tried = type(optimizer).__new__(type(optimizer))
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): tried, id(optimizer.state): state}
    for group in optimizer.param_groups:
        # Other attributes may refer to the parameters: in the copy they refer to empty ones.
        memo |= {id(param): torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")) for param in group["params"]}
    own = {key: value for key, value in vars(optimizer).items() if key != "step" and not key.startswith("_optimizer_")}
    tried.__setstate__(copy.deepcopy(own, memo))
    state.update({key: copy.deepcopy(of, memo) for key, of in optimizer.state.items() if not torch.is_tensor(key)})
    tried.param_groups[:] = [tried.param_groups[kind.index] for kind in kinds]
    for kind, group, tensors in zip(kinds, tried.param_groups, values, strict=True):
        group["params"] = [torch.nn.Parameter(value.clone()) for value in tensors]
        group.pop("param_names", None)
        for key, value in (("lr", lr), ("weight_decay", _DECAY)):
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                group[key] = torch.full_like(old, value)
            elif isinstance(old, int | float):
                group[key] = value
        for param in group["params"] if kind.state else ():
            # Flat pieces get that of any dimensions: of an elementwise optimizer all are alike.
            entries = kind.state.get(param.ndim) or next(iter(kind.state.values()))
            state[param] = {key: _initial(entry, param) for key, entry in entries.items()}
    return tried


def _initial(entry: Any, param: torch.Tensor) -> Any:
    if isinstance(entry, _Filled):
        return torch.full_like(param, entry.value, dtype=entry.dtype or param.dtype)
    return copy.deepcopy(entry)
