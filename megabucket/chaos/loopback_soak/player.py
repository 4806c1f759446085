"""Plays the program of one rank and writes down what that rank sees. Judges nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megabucket.chaos.loopback_soak.model import SoakModel
from megabucket.chaos.loopback_soak.model_changes import Before
from megabucket.chaos.loopback_soak.program import Block, WorldSpec
from megabucket.chaos.loopback_soak.seen import BlockSeen
from megabucket.chaos.loopback_soak.turns import Turns, TurnsCommunicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.step import GradSync
from megabucket.errors import CollectiveError, InFlightWriteError, PhaseError
from megabucket.optim import DistributedOptimizer
from megabucket.testing import LoopbackWorld

_COMPLETION_SHARE = 0.3
_PAUSE_SHARE = 0.08


class Player:
    """One rank of a world: a wrapped module, its optimizer, and what the training loop remembers.

    Constructing one wraps, so all ranks construct theirs at the same time, in threads.

    Args:
        turns: who runs when; the operating system decides if not given.
    """

    def __init__(self, rank: int, spec: WorldSpec, world: LoopbackWorld, turns: Turns | None) -> None:
        self.rank, self.spec = rank, spec
        self._world, self._turns = world, turns
        self._chance = random.Random(f"{spec.seed}/{rank}")  # noqa: S311 - no secret
        self.module = SoakModel(spec.model)
        self.module.pause = self.pause
        config = DistributedDataParallelConfig(**spec.switches)
        communicator = world.communicator(rank) if turns is None else TurnsCommunicator(world, rank, turns)
        self.ddp = DistributedDataParallel(self.module, config, communicator=communicator)
        sgd = torch.optim.SGD(self.ddp.parameters(), lr=1.0, momentum=spec.momentum)
        self.torch_optimizer: torch.optim.Optimizer = sgd
        self.optimizer: torch.optim.Optimizer = sgd
        if spec.wraps_optimizer:
            self.optimizer = DistributedOptimizer(sgd, self.ddp, returns_grad_norm=spec.returns_grad_norm)
        self.held: dict[int, torch.Tensor] = {}
        """Outputs that wait for their backward."""
        self.checkpoint: dict[str, torch.Tensor] = {}
        self.before: dict[str, Before] = {}
        """What ``Repair`` puts back."""
        self.seen = BlockSeen(step=0)
        self._broken: CollectiveError | None = None

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the wrapper by name, in order of registration."""
        by_name = {name: param for param, name in self.ddp.param_names.items()}
        return {name: by_name[name] for name in self.spec.model.numels if name in by_name}

    def pause(self) -> None:
        """Let other ranks run, or collectives complete, at a random moment."""
        if self._chance.random() < _PAUSE_SHARE:
            if self._turns is None:
                time.sleep(0)
            else:
                self._turns.pause(self.rank)
        if self.spec.completion != "manual" or self._chance.random() > _COMPLETION_SHARE:
            return
        for sequence in self._world.pending:
            if self._chance.random() < _COMPLETION_SHARE:
                try:
                    self._world.complete(sequence)
                except InFlightWriteError as error:
                    self._broken = error
                    raise
                except CollectiveError:
                    pass  # another rank has just completed it

    def play(self, blocks: Sequence[Block]) -> list[BlockSeen]:
        """Play the blocks; stop early only where a collective cannot be matched any more."""
        result = []
        for block in blocks:
            self._play_block(block)
            result.append(self.seen)
            if self.seen.broken is not None:
                break
        return result

    def _play_block(self, block: Block) -> None:
        sync = self._sync()
        seen = self.seen = BlockSeen(step=-1 if sync is None else sync.step)
        try:
            with self.ddp.step() if block.is_guarded else nullcontext():
                for act in block.acts:
                    seen.at = type(act).__name__
                    self.pause()
                    act.play(self)
                    seen.num_played += 1
            seen.at = ""
        except BaseException as error:
            seen.error, seen.cause = error, error.__cause__
            error.__traceback__ = None  # it would keep graphs alive
        for handle in self.module.hooks:
            handle.remove()
        self.module.hooks.clear()
        if not self.ddp.training:
            self.ddp.train()  # a forward in eval mode has failed
        seen.broken = self._find_broken(seen)

    def _sync(self) -> GradSync | None:
        """Return the sync of the wrapper; ``None`` after a rebuild that has failed."""
        try:
            return self.ddp.sync
        except PhaseError:
            return None

    def _find_broken(self, seen: BlockSeen) -> CollectiveError | None:
        """Return a broken collective, also one that the library keeps to itself while another exception is on its way."""
        sync = self._sync()
        last_error = None if sync is None else sync.last_error
        suspects: list[BaseException | None] = [self._broken, seen.error, seen.cause, last_error]
        return next((error for error in suspects if isinstance(error, CollectiveError)), None)
