"""The calls a training loop makes, one class each, so that programs can be printed, compared and cut shorter."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from megabucket.buffer import WithheldGrad
from megabucket.chaos.loopback_soak.model import loss_of
from megabucket.chaos.loopback_soak.program import Call, Clearing
from megabucket.chaos.loopback_soak.seen import Look
from megabucket.errors import PhaseError
from megabucket.optim import StepResult

if TYPE_CHECKING:
    from megabucket.chaos.loopback_soak.player import Player


class Act:
    """One call. ``is_work``: it belongs to a training step, and does not merely look."""

    is_work: ClassVar[bool] = True

    def play(self, rank: Player) -> None:
        """Make the call."""
        raise NotImplementedError


@dataclass(frozen=True)
class Number(Act):
    """Say which step this is."""

    number: int
    is_work = False

    def play(self, rank: Player) -> None:
        """Set ``ddp.step_number``."""
        rank.ddp.step_number = self.number


@dataclass(frozen=True)
class Forward(Act):
    """Run the module and keep its output under ``slot``."""

    slot: int
    call: Call
    how: str = "train"
    """``train``, ``eval`` or ``no_grad``."""

    def play(self, rank: Player) -> None:
        """Run it; note what came out."""
        if self.how == "eval":
            rank.ddp.eval()
        with torch.set_grad_enabled(self.how != "no_grad"):
            output = rank.module(self.call) if self.call.is_direct else rank.ddp(self.call)
            loss = loss_of(output, self.call)
        if self.how == "eval":
            rank.ddp.train()
        rank.held[self.slot] = loss
        rank.seen.losses.append(loss.item())


@dataclass(frozen=True)
class Backward(Act):
    """Differentiate the output under ``slot``."""

    slot: int
    depth: int = 0
    """0: outside ``no_sync()``; 1: inside; 2: inside, after a second context in the first was entered and left."""
    retains: bool = False
    joins: int = -1
    """Another output that is added to the first; -1: none."""

    def play(self, rank: Player) -> None:
        """Run it."""
        if self.joins >= 0:
            rank.held[self.slot] = rank.held[self.slot] + rank.held.pop(self.joins)
            replace(self, joins=-1).play(rank)
        elif self.depth:
            with rank.ddp.no_sync():
                if self.depth == 2:
                    with rank.ddp.no_sync():
                        pass
                replace(self, depth=0).play(rank)
        elif self.retains:
            rank.held[self.slot].backward(retain_graph=True)
        else:
            rank.held.pop(self.slot).backward()


@dataclass(frozen=True)
class Try(Act):
    """Another act whose exception the caller catches, and goes on."""

    act: Act

    def play(self, rank: Player) -> None:
        """Make the call."""
        with suppress(ValueError):
            self.act.play(rank)


@dataclass(frozen=True)
class Differentiate(Act):
    """``torch.autograd.grad`` of the output under ``slot``: accumulates nothing."""

    slot: int

    def play(self, rank: Player) -> None:
        """Run it."""
        params = [param for param in rank.module.parameters() if param.requires_grad]
        torch.autograd.grad(rank.held.pop(self.slot), params, allow_unused=True)


@dataclass(frozen=True)
class Raise(Act):
    """An exception in the caller's own code."""

    text: str
    interrupts: bool = False

    def play(self, rank: Player) -> None:  # noqa: ARG002 - the signature is that of all acts
        """Raise it."""
        raise KeyboardInterrupt(self.text) if self.interrupts else ValueError(self.text)


@dataclass(frozen=True)
class Start(Act):
    """``ddp.start_grad_sync()``."""

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.ddp.start_grad_sync()


@dataclass(frozen=True)
class Finish(Act):
    """``ddp.finish_grad_sync()``."""

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.ddp.finish_grad_sync()


@dataclass(frozen=True)
class Update(Act):
    """``optimizer.step()``."""

    updates: bool = True
    """Whether it changes weights."""

    def play(self, rank: Player) -> None:
        """Call it; note whether it says that it has updated."""
        result = rank.optimizer.step()
        rank.seen.updates.append(result.updated if isinstance(result, StepResult) else None)
        rank.seen.skip_reason = rank.ddp.sync.skip_reason


@dataclass(frozen=True)
class Zero(Act):
    """Clear gradients."""

    clearing: Clearing

    def play(self, rank: Player) -> None:
        """Clear them the given way."""
        if self.clearing is Clearing.WRAPPER:
            rank.ddp.zero_grad()
        elif self.clearing is Clearing.BUFFER:
            rank.ddp.zero_grad_buffer()
        else:
            rank.optimizer.zero_grad(set_to_none=self.clearing is Clearing.OPTIMIZER)


@dataclass(frozen=True)
class ClearAsTorch(Act):
    """``module.zero_grad()`` of the wrapped module."""

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.module.zero_grad()


@dataclass(frozen=True)
class LoadOwnWeights(Act):
    """``ddp.load_state_dict()`` with what is there already."""

    def play(self, rank: Player) -> None:
        """Load them."""
        rank.ddp.load_state_dict(rank.ddp.state_dict())


@dataclass(frozen=True)
class SetRate(Act):
    """Change the learning rate."""

    rate: float
    is_work = False

    def play(self, rank: Player) -> None:
        """Write it into the groups."""
        for group in rank.optimizer.param_groups:
            group["lr"] = self.rate


@dataclass(frozen=True)
class Abort(Act):
    """``ddp.abort_step(reason)``."""

    reason: str

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.ddp.abort_step(self.reason)


@dataclass(frozen=True)
class Force(Act):
    """Set ``ddp.force_all_reduce``."""

    value: bool
    is_work = False

    def play(self, rank: Player) -> None:
        """Set it."""
        rank.ddp.force_all_reduce = self.value


@dataclass(frozen=True)
class ClipTooEarly(Act):
    """``clip_grad_norm_`` before gradients are reduced, which must be refused and change nothing."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Catch the refusal."""
        try:
            torch.nn.utils.clip_grad_norm_(rank.trained().values(), 1.0)
        except PhaseError:
            return
        raise AssertionError("clipped gradients that are not whole")


@dataclass(frozen=True)
class LookAtGrads(Act):
    """Note every gradient and, if it is shown, ``param.grad``."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Copy them."""
        params = rank.trained()
        rank.seen.looks.append(
            Look(
                values=torch.cat([param.main_grad.reshape(-1).double() for param in params.values()]),  # type: ignore[attr-defined]
                absent=tuple(
                    name for name, param in params.items() if param.grad is None or isinstance(param.grad, WithheldGrad)
                ),
            )
        )
        rank.seen.skip_reason = rank.ddp.sync.skip_reason


@dataclass(frozen=True)
class LookAtWeights(Act):
    """Note every weight."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Copy them once they may be read."""
        rank.ddp.finish_param_sync()
        params = [rank.module.get_parameter(name) for name in rank.spec.model.numels]
        rank.seen.weights.append(torch.cat([param.detach().reshape(-1).double() for param in params]))


@dataclass(frozen=True)
class ReadLastError(Act):
    """Note ``ddp.last_error``."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Read it."""
        rank.seen.last_errors.append(rank.ddp.last_error)
        rank.seen.step_after = rank.ddp.sync.step


@dataclass(frozen=True)
class CheckReplicas(Act):
    """``ddp.check_replicas()``."""

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.ddp.check_replicas()


@dataclass(frozen=True)
class Save(Act):
    """Keep a checkpoint of the weights in memory."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Copy ``ddp.state_dict()``."""
        rank.checkpoint = {name: value.clone() for name, value in rank.ddp.state_dict().items()}


@dataclass(frozen=True)
class Restore(Act):
    """Load the checkpoint, and forget the momentum."""

    is_work = False

    def play(self, rank: Player) -> None:
        """Load it."""
        rank.ddp.load_state_dict(rank.checkpoint)
        rank.optimizer.state.clear()


@dataclass(frozen=True)
class FlipBit(Act):
    """Change one weight of this rank only."""

    param: str
    is_work = False

    def play(self, rank: Player) -> None:
        """Flip the lowest bit of the first element."""
        rank.ddp.finish_param_sync()
        values = rank.module.get_parameter(self.param).detach()
        values.view(torch.int32 if values.dtype == torch.float32 else torch.int64)[0] ^= 1


@dataclass(frozen=True)
class Sabotage(Act):
    """Let the torch optimizer fail at its next step."""

    text: str
    is_work = False

    def play(self, rank: Player) -> None:
        """Register a hook that raises once."""

        def fail(*_: object) -> None:
            handle.remove()
            raise ValueError(self.text)

        handle = rank.torch_optimizer.register_step_pre_hook(fail)


@dataclass(frozen=True)
class Rebuild(Act):
    """``ddp.rebuild()``."""

    trained: frozenset[str]
    """What requires a gradient then."""

    def play(self, rank: Player) -> None:
        """Call it."""
        rank.ddp.rebuild()
