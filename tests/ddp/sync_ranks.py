"""One rank of the gradient sync machine: the real thing, and what it must look like, in plain integers."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from megabucket.buffer import ParamAndGradBuffer, _ParamAndGradBucketGroup
from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_step
from megabucket.ddp.groups import single
from megabucket.ddp.hooks import grad_hooks
from megabucket.ddp.step import GradSync
from megabucket.layout import build_layout, launch_order


def pattern(numel):
    """1, 2, 3, 4, 1, 2, ...: what a gradient of 1 is."""
    return (torch.arange(numel) % 4 + 1).float()


class Boom(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise KeyError("boom")


class Rank:
    """The real thing: parameters in buffers, groups and their sync, without a module."""

    def __init__(self, rank, world, specs, config):
        self.params = {
            spec.name: torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in specs
        }
        layout = build_layout(specs, config, dp_size=world.size)
        self.buffers = [ParamAndGradBuffer(buffer, self.params) for buffer in layout.buffers]
        policy, communicator = resolve_step(config), world.communicator(rank)
        buckets = [self.buffers[i].buckets[j] for i, j in launch_order(layout)]
        batches = [buckets] if config.bucket_groups == "single" else [[bucket] for bucket in buckets]
        self.groups = [
            _ParamAndGradBucketGroup(batch, index=index, communicator=communicator, policy=policy, divisor=world.size)
            for index, batch in enumerate(batches)
        ]
        self.sync = GradSync(self.groups, policy, ranks=single(communicator, policy))
        for group in self.groups:
            for slot, hook in zip(group.slots, grad_hooks(self.sync, group), strict=True):
                slot.param.register_post_accumulate_grad_hook(hook)
        self.open_no_syncs = []

    def step(self):
        """Do what an optimizer does that is through with the gradients at once."""
        self.sync.finish(is_committing=self.sync.policy.is_sharded)
        self.sync.end_update()

    def backward(self, gradients, *, fails_after=None):
        """Run one backward in which the gradients arrive in the order given: that of the term made last comes first.

        Args:
            gradients: pairs of name and amount.
            fails_after: raise when so many of them have arrived.
        """
        parts = list(gradients)
        if fails_after is not None:
            parts.insert(fails_after, None)
        terms = [Boom.apply(torch.zeros((), requires_grad=True)) if part is None else self._term(*part) for part in parts[::-1]]
        loss = torch.stack(terms).sum()
        loss.register_hook(lambda _: self.sync.begin_backward())  # as the outputs of a wrapped module do
        loss.backward()

    def _term(self, name, amount):
        param = self.params[name]
        return (param * (pattern(param.numel()) * float(amount)).to(param.dtype)).sum().float()


@dataclass
class Expected:
    """What one rank must look like, in multiples of the pattern."""

    groups: list[list[str]]
    config: DistributedDataParallelConfig
    numels: dict[str, int]
    grads: dict[str, Fraction | float | None] = field(init=False)  # what param.grad holds, None for None
    counts: dict[str, int] = field(init=False)  # gradients that count, in this step
    learned: dict[str, int] = field(default_factory=dict)
    clean: set[str] = field(init=False)  # never written and never sent: nothing stale to clear
    sent: dict[str, Fraction | float | None] = field(default_factory=dict)  # as it was handed to the collective
    received: set[str] = field(default_factory=set)  # a backward has brought a gradient in this step
    own: set[str] = field(default_factory=set)  # the caller has put a gradient in place
    missing: set[str] = field(default_factory=set)  # sent although this step has brought nothing
    cleared: set[str] = field(default_factory=set)
    late: list[tuple[str, int, str]] = field(default_factory=list)  # name, bucket, phase
    failure: tuple[str, str] | None = None  # phase, beginning of the cause; its fence is on its way
    num_launched: int = 0
    num_microbatches: int = 0
    is_finished: bool = False
    kept: frozenset[str] = frozenset()
    has_local_grads: bool = False
    awaits_finish: bool = False

    def __post_init__(self):
        self.grads = dict.fromkeys(self.names)
        self.counts = dict.fromkeys(self.names, 0)
        self.clean = set(self.names)

    @property
    def names(self):
        return [name for names in self.groups for name in names]

    @property
    def is_averaged(self):
        return self.config.grad_reduction == "mean"

    @property
    def is_dropped_by_reset(self):
        return not self.is_finished and (self.awaits_finish or self.num_launched > 0)

    def group_of(self, name):
        return next(index for index, names in enumerate(self.groups) if name in names)

    def is_in_flight(self, name):
        return self.group_of(name) < self.num_launched

    def receive(self, name, amount, *, counts):
        """A gradient arrives. Not after a reduce-scatter that nobody has stepped on: there all ranks vote."""
        is_late = False
        if self.is_finished:
            is_late = not self.may_start_unasked()
            self.kept = frozenset(kept for kept in self.names if self.grads[kept] is not None and not is_late)
            if is_late:
                self.note_late(name, "already reduced")
            self.open_step()
        self.has_local_grads = True
        self.awaits_finish |= counts
        if self.is_in_flight(name):
            self.note_late(name, "in flight")
            return
        if not is_late:
            self.grads[name] = (self.grads[name] or 0) + amount
            self.clean.discard(name)
        self.received.add(name)
        self.counts[name] += counts
        if self.config.overlap_grad_reduce:
            self.launch_complete_ones()

    def may_start_unasked(self):
        if self.config.use_distributed_optimizer:
            return False
        return self.is_averaged or not any(grad is not None for grad in self.grads.values())

    def note_late(self, name, phase):
        self.grads[name] = None
        if name not in [late for late, _, _ in self.late]:
            self.late.append((name, self.group_of(name), phase))

    def clear(self):
        """Plain torch clears gradients, and says nothing about it."""
        self.grads = dict.fromkeys(self.names)
        self.own = set()

    def launch_up_to(self, num_groups):
        for names in self.groups[self.num_launched : num_groups]:
            for name in names:
                self.sent[name], self.grads[name] = self.grads[name], None
                if self.sent[name] is None or name not in self.received | self.own:
                    self.missing.add(name)
                    if name not in self.clean:
                        self.cleared.add(name)
                self.clean.discard(name)
                self.received.discard(name)
                self.own.discard(name)
        self.num_launched = max(self.num_launched, num_groups)

    def launch_all(self):
        self.launch_up_to(len(self.groups))

    def launch_complete_ones(self):
        while self.num_launched < len(self.groups) and all(
            name in self.learned and self.counts[name] >= self.learned[name] for name in self.groups[self.num_launched]
        ):
            self.launch_up_to(self.num_launched + 1)

    def open_step(self):
        self.is_finished, self.num_launched = False, 0
        self.sent, self.missing, self.cleared = {}, set(), set()

    def give_up(self, phase, cause, *, awaits_vote):
        self.failure = (phase, cause)
        if not awaits_vote:
            if self.is_finished:
                self.open_step()
            self.launch_all()

    def learn(self):
        for names in self.groups:
            if any(self.counts[name] for name in names) and names[0] not in self.learned:
                self.learned.update({name: max(1, self.counts[name]) for name in names})
        self.counts = dict.fromkeys(self.names, 0)

    def forget(self):
        """The step is over, because it was dropped."""
        if self.late and self.late[0][2] == "in flight":
            self.learned.clear()
        self.open_step()
        self.grads = dict.fromkeys(self.names)
        self.counts = dict.fromkeys(self.names, 0)
        self.received, self.own = set(), set()
        self.start_count()

    def start_count(self):
        self.late, self.failure, self.num_microbatches = [], None, 0
        self.kept, self.has_local_grads, self.awaits_finish = frozenset(), False, False

    # What this rank reports at the fence #

    def unused(self):
        return [name for name in self.names if name in (self.missing if self.has_local_grads else self.cleared)]

    def nonfinite(self):
        return [name for name in self.names if self.numels[name] and math.isinf(self.sent.get(name) or 0)]
