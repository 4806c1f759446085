"""Kinds of fault in calls: one rank alone in a collective call, two wrappers, gradients and settings of the user's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabucket.checkpoint.checkpointer import load_checkpoint, save_checkpoint

from .acts import ALL_LAYERS, Act, Acts, Do, after, before, find, make_step
from .cells import GRIDS, OURS_SHARDED, PAIRS, RIGHT, SHARDED, TWO, Cell, Combo, Fault, Here, Kind, Mode, Recovery, named
from .model import FaultModel, loss_of, make_batch
from .oracle import Oracle, first_difference
from .systems import Ours

_NAME = "layers.1.weight"
_SAMPLE = Path(tempfile.gettempdir()) / "megabucket-faults-no-checkpoint"

# One rank in a call, the others in a step #

_CALLS: Mapping[str, Callable[[Here], object]] = {
    "save_checkpoint": lambda here: save_checkpoint(_SAMPLE, here.ddp, here.optimizer, step=1),
    "load_checkpoint": lambda here: load_checkpoint(_SAMPLE, here.ddp, here.optimizer),
    "optimizer.state_dict": lambda here: here.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda here: here.optimizer.load_state_dict({}),
    "check_replicas": lambda here: here.ddp.check_replicas(),
    "export_weights": lambda here: list(here.ddp.export_weights(whole=True)),
    "rebuild": lambda here: here.ddp.rebuild(),
    "broadcast_params": lambda here: here.ddp.broadcast_params(),
    "wrap": lambda here: Ours(here.cell.combo).wrap(FaultModel(), {}),
}
_OF_SHARDS = ("optimizer.state_dict", "optimizer.load_state_dict")
_LEAVING = ("wrap",)
"""Calls outside of the wrapper that trains: its other ranks wait, and see on the board where this one is."""


def _one_call(cell: Cell) -> Fault:
    call = Act(Do.RUN, value=_CALLS[cell.place.removesuffix("-in-step")])
    at = Do.STEP if cell.place.endswith("-in-step") else Do.FORWARD
    expect = named("CallMismatchError", is_agreed=False)
    if cell.place in _LEAVING:
        # The wrap is what ends; whether the wrapper that trains is asked again, the rank at fault decides.
        errors = ("WrapperBrokenError", "PeerLostError")
        expect = named(errors, same_text=False, is_agreed=False, within_s=8.0, recovery=Recovery.STOP)
    return Fault(expect, edit=lambda acts: before(acts, at, call))


# Two wrappers #


def _second(here: Here) -> dict[str, Any]:
    """Return the second wrapper, its optimizer and its oracle; made by all ranks at the same time."""
    model = FaultModel()
    ours = Ours(here.cell.combo)
    ddp = ours.wrap(model, {})
    oracle = Oracle(model, here.cell.combo, here.rank, seed=here.cell.seed)
    return {"ddp": ddp, "optimizer": ours.make_optimizer(model, ddp, 0.0), "oracle": oracle}


def _forward_second(here: Here, batch: int) -> torch.Tensor:
    inputs, targets = make_batch(seed=here.cell.seed, batch=batch, rank=here.rank, microbatch=0)
    return loss_of(here.keepsake["ddp"](inputs, ALL_LAYERS), targets)


def _check_second(here: Here, batch: int) -> None:
    """Compare the weights of the second wrapper with what they must be.

    Raises:
        AssertionError: they differ.
    """
    second = here.keepsake
    second["ddp"].finish_param_sync()
    second["oracle"].compute([make_step(batch)] * here.num_ranks)
    second["oracle"].update()
    wrong = first_difference(dict(second["ddp"].module.named_parameters()), second["oracle"].weights())
    if wrong:
        raise AssertionError(f"SILENT: the second wrapper has {wrong}")


def _two_wrappers(cell: Cell) -> Fault:
    """Train two wrappers in one step; the place says what the rank at fault does in the other order."""

    def arm(here: Here) -> None:
        here.announce()
        here.keepsake = _second(here)

    def edit(acts: Acts) -> Acts:
        batch = acts[find(acts, Do.FORWARD)].batch

        def run(function: Callable[[Here], object]) -> Act:
            return Act(Do.RUN, batch=batch, value=function)

        def backward(here: Here) -> None:
            here.keepsake["loss"].backward()

        forward = run(lambda here: here.keepsake.update(loss=_forward_second(here, batch)))
        acts = after(acts, Do.FORWARD, forward)
        acts = after(acts, Do.BACKWARD, run(backward))
        acts = after(acts, Do.STEP, run(lambda here: here.keepsake["optimizer"].step()))
        return after(acts, Do.ZERO, run(lambda here: _check_second(here, batch)))

    def swapped(acts: Acts, do: Do) -> Acts:
        at = find(acts, do)
        return (*acts[:at], acts[at + 1], acts[at], *acts[at + 2 :])

    def edit_own(acts: Acts) -> Acts:
        for do in {"backward": (Do.BACKWARD,), "step": (Do.STEP,), "all": (Do.FORWARD, Do.BACKWARD, Do.STEP)}.get(
            cell.place, ()
        ):
            acts = swapped(acts, do)
        return acts

    errors = ("WrapperBrokenError", "CallMismatchError", "PeerLostError", "StepMismatchError")
    # A rank that is told by one wrapper drops its step in the other, whose ranks may go on.
    over = named(errors, same_text=False, is_agreed=False, within_s=8.0, recovery=Recovery.STOP)
    expect = replace(RIGHT, otherwise=(over,)) if cell.place != "same" else RIGHT
    return Fault(expect, arm=arm, edits_step=edit, edit=edit_own)


def _stray(cell: Cell) -> Fault:
    """Run a collective of the user's own on the given group, on one rank only."""

    def stray(here: Here) -> None:
        here.keepsake = dist.all_reduce(torch.ones(3), async_op=True)

    where = {"before": Do.FORWARD, "between": Do.BACKWARD, "in-step": Do.STEP}[cell.place]
    return Fault(RIGHT, edit=lambda acts: before(acts, where, Act(Do.RUN, value=stray)))


# Gradients and settings of the user's own #


def _assign_grads(here: Here) -> None:
    """Set gradients that no backward of the wrapper has brought."""
    inputs, targets = make_batch(seed=0, batch=0, rank=here.rank, microbatch=0)
    params = list(here.model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(here.model(inputs), targets), params), strict=True):
        param.grad = grad


def _overwrite_grad(here: Here) -> None:
    param = here.model.get_parameter(_NAME)
    param.grad = torch.ones_like(param)


def _replace_module(here: Here) -> None:
    here.step_stack.callback(setattr, here.ddp, "module", here.ddp.module)
    here.ddp.module = FaultModel()


def _unsynced(cell: Cell) -> Fault:
    """Step on gradients that were made or changed in another way than by a backward and its sync."""
    who, _, what = cell.place.partition("-")

    def edit(acts: Acts) -> Acts:
        if what == "assigned":
            at = find(acts, Do.LOOK)
            return (Act(Do.RUN, value=_assign_grads), *acts[at + 1 :])
        if what == "module-replaced":
            return before(acts, Do.FORWARD, Act(Do.RUN, value=_replace_module))
        return after(acts, Do.BACKWARD, Act(Do.RUN, value=_overwrite_grad))

    errors = {
        "assigned": ("UnreducedGradientsError", "PeerFailedError"),
        "module-replaced": ("PhaseError",),
        "overwritten": ("DetachedGradError", "PhaseError", "StepMismatchError", "PeerFailedError"),
    }[what]
    return Fault(named(errors, same_text=False, is_agreed=False), edit=edit, on_all=who == "all")


_REMOVED: Mapping[str, int] = {"shard-removed": 0, "group-emptied": 1}
"""The group that loses a parameter. Of the second one the first rank has the shard, the others have nothing."""


def _settings(cell: Cell) -> Fault:
    """Take a parameter out of the optimizer's groups, all that are in one, or set a learning rate that is not finite."""
    who, _, what = cell.place.partition("-")

    def arm(here: Here) -> None:
        if not (who == "all" or here.is_culprit):
            return
        here.announce()
        group = here.optimizer.param_groups[0]
        if what in _REMOVED:
            group = here.optimizer.param_groups[_REMOVED[what]]
            here.step_stack.callback(group.__setitem__, "params", group["params"])
            group["params"] = group["params"][1:]
        else:
            here.step_stack.callback(group.__setitem__, "lr", group["lr"])
            group["lr"] = float(what.removeprefix("lr-"))

    kinds = ("OptimizerParametersError", "PhaseError") if what in _REMOVED else ("ConfigError",)
    expect = named((*kinds, "PeerFailedError", "HyperparameterMismatchError"), same_text=False, is_agreed=False)
    return Fault(expect, arm=arm, on_all=who == "all")


_NO_TORCH = "torch DDP has no such call"
CALL_KINDS = (
    Kind(
        "one-call",
        "A rank alone in a collective call: one error on all ranks says who is in which call; the next step is right.",
        _one_call,
        places=tuple(name for name in _CALLS if name not in (*_OF_SHARDS, *_LEAVING)),
        combos=(*PAIRS, *GRIDS),
        not_in_torch=_NO_TORCH,
    ),
    Kind(
        "one-call-of-shards",
        "As one-call, for the optimizer's state.",
        _one_call,
        places=_OF_SHARDS,
        combos=(*SHARDED, *(combo for combo in GRIDS if combo.is_sharded)),
        not_in_torch=_NO_TORCH,
    ),
    Kind(
        "one-wraps",
        "A rank that wraps while the others step: named on all ranks in time.",
        _one_call,
        places=_LEAVING,
        combos=TWO,
        needs_processes=True,
        not_in_torch=_NO_TORCH,
        soaks=False,
    ),
    Kind(
        "two-wrappers",
        "Two wrappers on one group: right in any order, or one named error and broken on all.",
        _two_wrappers,
        places=("same", "backward", "step", "all"),
        combos=TWO,
        needs_processes=True,
        not_in_torch="the second wrapper is ours",
        soaks=False,
    ),
    Kind(
        "stray-collective",
        "Right: a collective of the user's own on one rank meets nothing of ours.",
        _stray,
        places=("before", "between", "in-step"),
        combos=TWO,
        needs_processes=True,
        soaks=False,
    ),
    Kind(
        "unsynced",
        "No optimizer steps on gradients that no sync has reduced; the next step is right.",
        _unsynced,
        places=("one-assigned", "all-assigned", "all-module-replaced"),
        combos=TWO,
        soaks=False,
    ),
    Kind(
        "grad-overwritten",
        "A gradient assigned over a withheld one is an error; the next step is right.",
        _unsynced,
        places=("one-overwritten", "all-overwritten"),
        combos=SHARDED[:2],
        not_in_torch="torch DDP withholds nothing",
        soaks=False,
    ),
    Kind(
        "shard-removed",
        "A parameter taken out of the optimizer's groups: named, and nobody updates.",
        _settings,
        places=("one-shard-removed", "all-shard-removed", "one-group-emptied"),
        combos=(Combo(Mode.REDUCE_SCATTER, False, 2),),  # the first rank is at fault, and owns something
        not_in_torch="torch DDP has no shards",
        soaks=False,
    ),
    Kind(
        "absent-removed",
        "A parameter taken out of the groups on a rank that has nothing of it: named, and nobody updates.",
        _settings,
        places=("one-group-emptied",),
        combos=(Combo(Mode.REDUCE_SCATTER, True, 2),),
        not_in_torch="torch DDP has no shards",
        soaks=False,
    ),
    Kind(
        "bad-settings",
        "A learning rate that is not finite: named, and nobody updates.",
        _settings,
        places=tuple(f"{who}-{what}" for what in ("lr-nan", "lr-inf") for who in ("one", "all")),
        combos=(*SHARDED[:2], *OURS_SHARDED),
        not_in_torch="torch DDP looks at no settings",
    ),
)
