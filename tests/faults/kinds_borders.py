"""Kinds of fault at the borders with torch and its users: copies, other owners, hooks, calls in backward, ends of a program."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megabucket.ddp.finalize import finalize_grads
from megabucket.errors import MegabucketError, PhaseError
from megabucket.optim.averaging import ShardedEMA

from .acts import Act, Acts, Do, Edit, after, before, changed
from .cells import (
    GRIDS,
    HEALTHY_STEPS,
    PAIRS,
    RIGHT,
    TWO,
    AnyOf,
    Cell,
    Fault,
    FaultError,
    Form,
    Here,
    Kind,
    Recovery,
    in_forms,
    named,
)
from .model import DELAYED, FaultModel, loss_of, make_batch
from .oracle import first_difference
from .trip import boom, install

_NAME = "layers.2.weight"
_NO_TORCH = "torch DDP has no such call"

# Copies #

_WAYS: Mapping[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301 - our own
}
_COPIED: Mapping[str, Callable[[Here], Any]] = {
    "optimizer": lambda here: here.optimizer.optimizer if here.cell.combo.form in (Form.SCALER, Form.AMP) else here.optimizer,
    "scaler": lambda here: here.optimizer.scaler,
    "ema": lambda here: ShardedEMA(here.optimizer, decay=0.5),
    "wrapper": lambda here: here.ddp,
    "module": lambda here: here.ddp.module,
}


def _copied(cell: Cell) -> Fault:
    """Copy something on one rank and go on with the original. Only a module may be copied, and then is a plain one."""
    what, way = cell.place.split("-")

    def make(here: Here) -> None:
        here.ddp.finish_param_sync()
        try:
            made = _WAYS[way](_COPIED[what](here))
        except MegabucketError:
            return
        if what != "module":
            raise AssertionError(f"{way} of the {what} was not refused")
        wrong = first_difference(dict(made.named_parameters()), dict(here.model.named_parameters()))
        inputs, targets = make_batch(seed=0, batch=0, rank=0, microbatch=0)
        if way != "copy":  # which shares parameters and hooks with the original
            loss_of(made(inputs), targets).backward()
            wrong = wrong or ("" if all(param.grad is not None for param in made.parameters()) else "no gradients")
        if wrong:
            raise AssertionError(f"{way} of the module has {wrong}")

    return Fault(RIGHT, edit=lambda acts: before(acts, Do.FORWARD, Act(Do.RUN, value=make)))


# Other owners #


def _with_layer(wrap: Callable[[torch.nn.Module], Any]) -> Callable[[], FaultModel]:
    def build() -> FaultModel:
        model = FaultModel()
        model.layers["1"] = wrap(model.layers["1"])
        return model

    return build


def _fully_sharded(module: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # seconds, which only this needs

    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


_OWNERS: Mapping[str, Callable[[Any], Any]] = {"ddp": TorchDDP, "fsdp2": _fully_sharded, "dp": DataParallel}


def _foreign(cell: Cell) -> Fault:
    """Let torch own gradients of the same parameters, inside or around the wrapper."""
    place, owner = cell.place.split("-")
    expect = named("MegabucketError", at_wrap=True, same_text=False)
    if place == "inside":
        return Fault(expect, own_build=_with_layer(_OWNERS[owner]), on_all=True)

    def around(ddp: Any) -> None:
        outer = _OWNERS[owner](ddp)
        inputs, targets = make_batch(seed=0, batch=0, rank=0, microbatch=0)
        loss_of(outer(inputs), targets).backward()

    return Fault(expect, around=around, on_all=True)


# Hooks of the user's own #


def _user_hook(cell: Cell) -> Fault:
    """Register a post-accumulate hook after wrapping; what it leaves in ``.grad`` is the gradient."""
    who, _, what = cell.place.partition("-")
    config = {"unused_parameters": "zero"} if what == "cleared" else {}
    if what == "raises":

        def arm(here: Here) -> None:
            if here.is_culprit:
                hook = here.model.get_parameter(_NAME).register_post_accumulate_grad_hook(lambda _: boom(here))
                here.step_stack.callback(hook.remove)

        return Fault(named("PeerFailedError", fields={"rank": cell.culprit}, own_error=("FaultError",)), arm=arm)
    edits = (Edit(_NAME, what),)
    return Fault(RIGHT, edit=lambda acts: changed(acts, Do.BACKWARD, edits=edits), on_all=who == "all", config=config)


# Calls #

_IN_BACKWARD: Mapping[str, Callable[[Here], object]] = {
    "check_replicas": lambda here: here.ddp.check_replicas(),
    "broadcast_params": lambda here: here.ddp.broadcast_params(),
    "rebuild": lambda here: here.ddp.rebuild(),
    "finalize_grads": lambda here: finalize_grads(here.ddp),
    "finish_grad_sync": lambda here: here.ddp.finish_grad_sync(),
}


def _call_in_backward(cell: Cell) -> Fault:
    """Make a collective call in a hook of backward, on one rank: refused there. Its backward fails with it, or goes on."""
    name, _, caught = cell.place.partition("+")

    def call(here: Here) -> None:
        here.announce()
        try:
            _IN_BACKWARD[name](here)
        except PhaseError:
            if not caught:
                raise
            return
        raise AssertionError(f"{name} in backward was not refused")

    own = () if caught else ("PhaseError",)
    expect = RIGHT if caught else named("PeerFailedError", fields={"rank": cell.culprit}, own_error=own)
    return Fault(expect, arm=lambda here: install(here, "backward-1", call) if here.is_culprit else None)


_TOKENS: Mapping[str, Any] = {
    "right": 1.0,
    "two": torch.tensor([1.0, 1.0]),
    "text": "8",
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "object": object(),
}


def _tokens(cell: Cell) -> Fault:
    """Divide by the number of tokens, one on each rank, which is a mean; the rank at fault gives something else, or nothing."""

    def finalize(value: Any) -> Act:
        def call(here: Here) -> None:
            if here.is_culprit and value is not _TOKENS["right"]:
                here.announce()
            finalize_grads(getattr(here.ddp, "parts", here.ddp), num_tokens=value)

        return Act(Do.RUN, value=call)

    def edit_all(acts: Acts) -> Acts:
        acts = tuple(act for act in acts if act.do is not Do.FINISH)
        return before(acts, Do.LOOK, right)

    right = finalize(1.0)
    errors = ("MegabucketError",)
    either = {"step": AnyOf((HEALTHY_STEPS, HEALTHY_STEPS + 1))}  # with whole gradients it has been counted by then
    if cell.place == "missing":
        # With whole gradients the rank at fault may have updated, and meets the others in its next step.
        at_once = named(errors, same_text=False, is_agreed=False)
        later = replace(at_once, culprit_later_by=1, recovery=Recovery.RELOAD)
        later = replace(later, errors=("CallMismatchError", "ReplicasDivergedError"), fields=either)
        over = replace(at_once, errors=("WrapperBrokenError",), recovery=Recovery.OVER)
        expect = replace(
            at_once if cell.combo.is_sharded else replace(at_once, recovery=Recovery.RELOAD), otherwise=(later, over)
        )
        edit = lambda acts: tuple(act for act in acts if act is not right)  # noqa: E731
    else:
        wrong = finalize(_TOKENS[cell.place])
        edit = lambda acts: tuple(wrong if act is right else act for act in acts)  # noqa: E731
        fields = {} if cell.place == "none" else either
        expect = named(errors, same_text=False, is_agreed=False, fields=fields)
    return Fault(expect, edits_all=edit_all, edit=edit, config={"grad_reduction": "sum"})


def _late_grad(cell: Cell) -> Fault:
    """Hand a gradient over once too often, after the step: refused on its rank, and the step is right. Or not at all."""
    if cell.place == "missing":

        def arm(here: Here) -> None:
            if here.is_culprit:
                here.announce()
                layer: Any = here.model.layers["1"]
                layer.take_grads, taken = list, layer.take_grads
                here.step_stack.callback(setattr, layer, "take_grads", taken)

        return Fault(named("DelayedGradientError"), arm=arm)

    def hand_over(here: Here) -> None:
        param = here.model.get_parameter(DELAYED)
        param.grad = torch.ones_like(param)
        try:
            here.ddp.grad_ready(param)
        except PhaseError:
            return
        raise AssertionError("a gradient after the step was not refused")

    def edit(acts: Acts) -> Acts:
        return after(acts, Do.STEP, Act(Do.RUN, value=hand_over))

    return Fault(RIGHT, edit=edit)


# The end of a program #

_ENDS_S = 10.0


def _collected(here: Here) -> None:
    """Let go of everything.

    Raises:
        AssertionError: something still holds the wrapper.
    """
    left = weakref.ref(here.ddp)
    here.ddp = here.optimizer = here.model = here.keepsake = None  # type: ignore[assignment]
    here.remake_optimizer = lambda: None
    here.points.clear()
    gc.collect()
    if left() is not None:
        raise AssertionError(f"the wrapper is held by {gc.get_referrers(left())}")


_ENDS: Mapping[str, Callable[[Here], object]] = {
    "detach": lambda here: here.ddp.detach(),
    "block": lambda _: None,  # leaving it was the end
    "collected": _collected,
    "unused": lambda _: None,
}


def _ends(cell: Cell) -> Fault:
    """Raise out of the program on one rank while the others are in a collective of the user's own."""
    where, way = cell.place.split("-")

    def log(here: Here) -> None:
        dist.all_reduce(torch.ones(1))

    def fail(here: Here) -> None:
        here.announce()
        raise FaultError

    at = {"forward": Do.BACKWARD, "backward": Do.LOOK}[where]
    errors = ("RuntimeError", "DistError")
    expect = named(errors, own_error=("FaultError", "PeerFailedError"), same_text=False, is_agreed=False, within_s=_ENDS_S)
    return Fault(
        replace(expect, recovery=Recovery.STOP),
        edits_step=lambda acts: before(acts, at, Act(Do.RUN, value=log)),
        edit=lambda acts: tuple(
            replace(act, value=fail) if act.value is not None and act.do is Do.RUN else act for act in acts
        ),
        ends=_ENDS[way],
        uses_block=way == "block",
        group_timeout_s=60.0,
    )


BORDER_KINDS = (
    Kind(
        "copied",
        "Copies and pickles are refused, or plain modules; the original trains on.",
        _copied,
        places=tuple(f"{what}-{way}" for what in ("optimizer", "ema", "wrapper", "module") for way in _WAYS),
        combos=(TWO[1], in_forms(Form.CLOSURE)[1]),
        not_in_torch="the optimizer is ours",
        soaks=False,  # a copy that is not refused spoils the process
    ),
    Kind(
        "copied-form",
        "As copied: the chain, the optimizer and the scaler of each form.",
        _copied,
        places=tuple(f"optimizer-{way}" for way in _WAYS),
        combos=in_forms(Form.CHAINED, Form.SCALER, Form.COPIES),
        not_in_torch="the optimizer is ours",
        soaks=False,  # a copy that is not refused spoils the process
    ),
    Kind(
        "copied-scaler",
        "As copied.",
        _copied,
        places=tuple(f"scaler-{way}" for way in _WAYS),
        combos=in_forms(Form.SCALER),
        not_in_torch="the scaler is ours",
        soaks=False,  # a copy that is not refused spoils the process
    ),
    Kind(
        "foreign-wrapper",
        "Another owner of the gradients, inside or around the wrapper, is named when wrapping.",
        _foreign,
        places=tuple(f"{place}-{owner}" for place in ("inside", "around") for owner in _OWNERS),
        combos=TWO,
        needs_processes=True,
        not_in_torch="the foreign wrapper is torch's",
        soaks=False,
    ),
    Kind(
        "user-hook",
        "What a post-accumulate hook leaves in .grad is the gradient; one that raises is an exception in backward.",
        _user_hook,
        places=("one-doubled", "all-doubled", "one-replaced", "all-replaced", "one-cleared", "all-cleared", "one-raises"),
        combos=(*PAIRS, *in_forms(Form.GROUPS, Form.REPLICAS, Form.CHAINED, Form.CLOSURE)),
    ),
    Kind(
        "call-in-backward",
        "A call in backward is refused on its own rank: its backward fails, or it catches the error and all is right.",
        _call_in_backward,
        places=(*_IN_BACKWARD, *(f"{name}+caught" for name in _IN_BACKWARD)),
        combos=(*TWO, *GRIDS, *in_forms(Form.CLOSURE)),
        not_in_torch=_NO_TORCH,
    ),
    Kind(
        "tokens",
        "Something else than a number of tokens is named on all ranks; the next step is right.",
        _tokens,
        places=tuple(_TOKENS)[1:],
        combos=(*TWO, *GRIDS, *in_forms(Form.CHAINED)),
        not_in_torch=_NO_TORCH,
        soaks=False,
    ),
    Kind(
        "finalize-left-out",
        "A rank without its call of finalize_grads() is named on all ranks, at the latest in its next step.",
        _tokens,
        places=("missing",),
        combos=(*TWO, *GRIDS),
        not_in_torch=_NO_TORCH,
        soaks=False,
    ),
    Kind(
        "delayed-gradient",
        "Missing: named on all ranks. Once too often, after the step: refused on its rank, and right.",
        _late_grad,
        places=("missing", "late"),
        combos=in_forms(Form.DELAYED),
        not_in_torch=_NO_TORCH,
        soaks=False,
    ),
    Kind(
        "program-ends",
        "An exception ends the program of one rank within 10 s though the others are in a collective of the user's own.",
        _ends,
        places=tuple(f"{where}-{way}" for where in ("forward", "backward") for way in _ENDS),
        combos=(*TWO, *GRIDS, *in_forms(Form.CHAINED)),
        needs_processes=True,
        not_in_torch="the program ends by calls of our wrapper",
        soaks=False,
    ),
)
