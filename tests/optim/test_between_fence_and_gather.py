"""A rank that fails or is interrupted in its optimizer step: before the fence the step is dropped, behind it all ranks stop.

Behind the fence the others update and gather, whatever happens on this rank, so nothing but an end for all is honest.
"""

import threading
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, save_checkpoint
from megabucket.comm import Communicator, Handle
from megabucket.errors import MegabucketError, PeerFailedError, PhaseError, ReplicasDivergedError, WrapperBrokenError
from megabucket.optim.shards import MainShard
from megabucket.testing import LoopbackWorld

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
BROKEN = (
    "The wrapper is broken on all ranks: nothing can be sent any more, and parameters may be of two different steps. On every "
    "rank call ddp.detach(), wrap the module again, make the optimizer anew and load the last checkpoint."
)
SIZE = 3
FAULTY = 1


class Weights(torch.nn.Module):
    """The gradient of each element is ``x``."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name in "ab":
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(300, dtype=dtype)))

    def forward(self, x):
        return (self.a * x).sum() + (self.b * x).sum()


class Interrupted(Communicator):
    """Another communicator, whose next wait for a batch of a given label is ended by an exception, as by a signal handler."""

    def __init__(self, inner, alarm=None):
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner = inner
        self.alarm = alarm or SimpleNamespace(label="", interrupt=None)
        if inner.control is not inner:
            self.control = Interrupted(inner.control, self.alarm)
            self.control.progress = self.progress

    def _handle(self, batch, record, *, is_kept):
        return InterruptedHandle(self._inner._handle(batch, record, is_kept=is_kept), record.label, self.alarm)

    def break_off(self, error):
        self._inner.break_off(error)


class InterruptedHandle(Handle):
    def __init__(self, inner, label, alarm):
        self._inner, self._label, self._alarm = inner, label, alarm

    @property
    def is_started(self):
        return self._inner.is_started

    def start(self):
        self._inner.start()

    def wait(self):
        if self._label == self._alarm.label:
            self._alarm.label = ""
            raise self._alarm.interrupt
        self._inner.wait()


class Ranks:
    def __init__(self, dtype=torch.float32, optimizer_fields=MappingProxyType({"clip_grad": 1e9}), **switches):
        self.world = LoopbackWorld(SIZE, timeout_s=30)
        self.communicators = [Interrupted(self.world.communicator(rank)) for rank in range(SIZE)]
        config = DistributedDataParallelConfig(bucket_size=1, **switches)

        def wrap(rank):
            ddp = DistributedDataParallel(Weights(dtype), config, communicator=self.communicators[rank])
            return ddp, DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1.0), ddp, **optimizer_fields)

        self.wrapped = self.world.run(wrap)

    def steps(self, *, in_block, before=lambda *_: None, num_steps=3):
        """Run steps; ``before(index, ddp, optimizer)`` prepares the fault on one rank.

        Returns what each rank saw in each step, its weights, and the last error of all.
        """

        def play(rank):
            ddp, optimizer = self.wrapped[rank]
            seen = []
            for index in range(num_steps):
                if rank == FAULTY:
                    before(index, ddp, optimizer)
                try:
                    if in_block:
                        with ddp.step():
                            ddp(rank + 1.0).backward()
                            optimizer.step()
                    else:
                        ddp(rank + 1.0).backward()
                        optimizer.step()
                    optimizer.zero_grad()
                    seen.append(None)
                except BaseException as error:
                    seen.append((type(error), str(error)))
                    with suppress(WrapperBrokenError):
                        optimizer.zero_grad()
            with suppress(WrapperBrokenError):
                ddp.finish_param_sync()
            return seen, ddp.module.a[0].item(), str(ddp.last_error) if ddp.sync.broken is None else "broken"

        return self.world.run(play)


def assert_all_are_broken(ranks, results, *, own, told):
    """The faulty rank has seen its own exception; every step of any rank that came after it has raised the same error."""
    for rank, (seen, _, last_error) in enumerate(results):
        assert seen[0] is None
        assert last_error == "broken"
        first = next(index for index, error in enumerate(seen) if error is not None)
        after = seen[first + 1 :] if rank == FAULTY else seen[first:]
        assert after == [(WrapperBrokenError, told)] * len(after) != []
        assert rank != FAULTY or seen[1] == own
        assert first in (1, 2)  # the others may have ended the step before they could hear of it

    def train_alone(rank):
        ddp, _ = ranks.wrapped[rank]
        module = ddp.detach()
        module(1.0).backward()
        return [param.grad.sum().item() for param in module.parameters()]

    assert ranks.world.run(train_alone) == [[300.0, 300.0]] * SIZE


def no_memory(*_, **__):
    raise MemoryError("no memory")


def failing_in_step_1(monkeypatch):
    """What prepares a rank whose shards cannot be read again, before the fence."""

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index == 1:
            optimizer.sharding._num_value_changes -= 1  # as after a load
            monkeypatch.setattr(optimizer.sharding, "reload", no_memory)

    return before


class Failing(dict):
    """The shards of each bucket group, whom nobody can look at: an interrupt, while squares are taken."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, _):
        raise self.error


NO_NORM = {"returns_grad_norm": False}
NORMS = pytest.mark.parametrize("optimizer_fields", [{"clip_grad": 1e9}, NO_NORM], ids=["norm", "no norm"])


@NORMS
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_before_the_fence_drops_the_step_on_all_ranks(optimizer_fields, in_block, overlap, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True, overlap_param_gather=overlap)

    told = f"step 1: rank 1 failed in optimizer.step(): MemoryError: no memory. {DROPPED}"
    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=in_block, before=failing_in_step_1(monkeypatch))):
        own = (MemoryError, "no memory") if rank == FAULTY and not in_block else (PeerFailedError, told)
        assert seen == [None, own, None]
        assert last_error == told
        assert weight == -4.0  # the mean of 1, 2, 3, in two steps


LOAD_GRAD = MainShard.load_grad
BEHIND = {
    "squares": lambda optimizer, patch, error: patch(optimizer.sharding, "counted_grads", Failing(error)),
    "gradients": lambda optimizer, patch, error: patch(MainShard, "load_grad", raising(error, optimizer.sharding.shards[0])),
    "norm": lambda optimizer, patch, error: patch(optimizer.global_norm, "of", raising(error)),
    "update": lambda optimizer, patch, error: patch(optimizer.sharding.updates[0], "step", raising(error)),
    "values": lambda optimizer, patch, error: patch(optimizer.sharding, "store_values", raising(error)),
    "gather": lambda optimizer, patch, error: patch(optimizer.ddp, "start_param_sync", raising(error)),
}
INTERRUPTS = pytest.mark.parametrize(
    "error", [MemoryError("no memory"), TimeoutError("alarm"), KeyboardInterrupt()], ids=["failure", "alarm", "Ctrl-C"]
)


def raising(error, of_shard=None):
    """A method that fails; one that all shards of all ranks share fails for one of them."""

    def fail(*args, **_):
        if of_shard in (None, *args):
            raise error
        return LOAD_GRAD(*args)

    return fail


@pytest.mark.pairs
@INTERRUPTS
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("where", "optimizer_fields"),
    [
        *[(where, {"clip_grad": 1e9}) for where in BEHIND],
        *[(where, NO_NORM) for where in BEHIND if where not in ("squares", "norm")],
    ],
)
def test_a_failure_behind_the_fence_breaks_the_wrapper_on_all_ranks(where, optimizer_fields, in_block, error, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True)

    def before(index, _, optimizer):
        if index == 1:
            BEHIND[where](optimizer, monkeypatch.setattr, error)

    results = ranks.steps(in_block=in_block, before=before)

    cause = f"{type(error).__name__}: {error}"
    told = f"step 1: rank 1 stopped in optimizer.step(), with the others about to go on: {cause}. {BROKEN}"
    assert_all_are_broken(ranks, results, own=(type(error), str(error)), told=told)


@pytest.mark.parametrize("where", ["gradients", "update", "values"])
def test_after_an_all_reduce_a_failure_in_the_update_breaks_the_wrapper_on_all_ranks(where, monkeypatch):
    ranks = Ranks()

    def before(index, _, optimizer):
        if index == 1:
            BEHIND[where](optimizer, monkeypatch.setattr, MemoryError("no memory"))

    results = ranks.steps(in_block=False, before=before)

    told = f"step 1: rank 1 stopped in optimizer.step(), with the others about to go on: MemoryError: no memory. {BROKEN}"
    assert_all_are_broken(ranks, results, own=(MemoryError, "no memory"), told=told)


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("label", "overlap"),
    [
        *[(label, overlap) for label in ("bucket 0", "fence", "grad norm") for overlap in (False, True)],
        ("param gather 0", False),  # with overlap the next forward waits for it
    ],
)
def test_a_wait_behind_the_fence_that_is_interrupted_breaks_the_wrapper_on_all_ranks(label, in_block, overlap):
    ranks = Ranks(use_distributed_optimizer=True, overlap_param_gather=overlap)

    def before(index, ddp, _):
        if index == 1:
            ddp.communicator.alarm.label, ddp.communicator.alarm.interrupt = label, TimeoutError("alarm")

    results = ranks.steps(in_block=in_block, before=before)

    is_in_sync = label in ("bucket 0", "fence")
    where = "the gradient sync" if is_in_sync else "optimizer.step()"
    told = f"step 1: rank 1 stopped in {where}, with the others about to go on: TimeoutError: alarm. {BROKEN}"
    assert_all_are_broken(ranks, results, own=(TimeoutError, "alarm"), told=told)


@NORMS
def test_without_a_fence_a_failure_before_the_norm_updates_nobody_and_leaves_ranks_in_step(optimizer_fields, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True, fence=False)

    for rank, (seen, weight, _) in enumerate(ranks.steps(in_block=False, before=failing_in_step_1(monkeypatch))):
        assert seen == [None, (MemoryError, "no memory") if rank == FAULTY else None, None]
        assert weight == -4.0


@NORMS
def test_a_second_step_on_the_same_gradients_ends_no_step_of_the_others_whatever_else_is_wrong(optimizer_fields, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        for index in range(3):
            ddp(1.0).backward()
            optimizer.step()
            if rank == FAULTY and index == 1:
                optimizer.sharding._num_value_changes -= 1  # as after a load
                monkeypatch.setattr(optimizer.sharding, "reload", no_memory)
                with pytest.raises(PhaseError, match="called twice"):
                    optimizer.step()
                monkeypatch.undo()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return ddp.module.a[0].item(), ddp.last_error

    assert ranks.world.run(play) == [(-3.0, None)] * SIZE


def test_with_all_reduce_an_update_that_one_rank_has_missed_is_named_with_its_cause(monkeypatch):
    """There is nothing behind the fence that could keep the others from updating."""
    ranks = Ranks(dtype=torch.bfloat16)

    for rank, (seen, _, last_error) in enumerate(
        ranks.steps(in_block=True, before=failing_in_step_1(monkeypatch), num_steps=4)
    ):
        assert seen[0] is None
        assert seen[1] == ((MemoryError, "no memory") if rank == FAULTY else None)
        assert seen[2] == (ReplicasDivergedError, last_error)
        assert "(rank 1 made none because of MemoryError: no memory) differ between ranks: 1 on ranks 0, 2; 0 on" in last_error
        assert seen[3] is None


@pytest.mark.parametrize("label", ["fence", "step report"])
def test_an_interrupt_while_ranks_agree_that_the_step_is_dropped_breaks_the_wrapper_on_all_of_them(label):
    """Nobody knows whether the interrupted rank has heard the verdict."""
    ranks = Ranks(use_distributed_optimizer=True)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        seen = []
        for index in range(3):
            if index == 0 and rank == 0:
                ddp.abort_step("no")
            if index == 0 and rank == FAULTY:
                ddp.communicator.alarm.label, ddp.communicator.alarm.interrupt = label, TimeoutError("alarm")
            try:
                if (index, rank) != (0, 0):
                    ddp(1.0).backward()
                optimizer.step()
                optimizer.zero_grad()
            except MegabucketError as error:
                seen.append(str(error))
            except TimeoutError as error:
                seen.append(str(error))
        return seen[-2:]

    told = f"step 0: rank 1 stopped in the gradient sync, with the others about to go on: TimeoutError: alarm. {BROKEN}"
    assert ranks.world.run(play) == [[told, told]] * SIZE


CALLS = {
    "state_dict": lambda _, optimizer, *__: optimizer.state_dict(),
    "save_checkpoint": lambda ddp, optimizer, path: save_checkpoint(path, ddp, optimizer, step=1),
    "check_replicas": lambda ddp, *_: ddp.check_replicas(),
    "rebuild": lambda ddp, *_: ddp.rebuild(),
    "broadcast_params": lambda ddp, *_: ddp.broadcast_params(),
    "abort_step": lambda ddp, *_: ddp.abort_step("no"),
    "zero_grad": lambda ddp, *_: ddp.zero_grad(),
    "step": lambda _, optimizer, *__: optimizer.step(),
    "forward": lambda ddp, *_: ddp(1.0),
}


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_after_an_update_that_has_failed_every_call_says_so_on_every_rank(call, sharded, monkeypatch, tmp_path):
    """The others have updated, so what is saved, say, would be of no step. After an all-reduce they hear of it as they send."""
    ranks = Ranks(use_distributed_optimizer=sharded)
    everybody = threading.Barrier(SIZE)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        ddp(1.0).backward()
        if rank == FAULTY:
            monkeypatch.setattr(optimizer.sharding.updates[0], "step", no_memory)
        with suppress(MemoryError, WrapperBrokenError):
            optimizer.step()
        everybody.wait()
        try:
            CALLS[call](ddp, optimizer, tmp_path)
        except WrapperBrokenError as error:
            return str(error)
        return "no error"

    told = f"step 0: rank 1 stopped in optimizer.step(), with the others about to go on: MemoryError: no memory. {BROKEN}"
    sends = sharded or call not in ("abort_step", "zero_grad", "step", "forward")
    assert ranks.world.run(play) == [told if sends or rank == FAULTY else "no error" for rank in range(SIZE)]
    assert not list(tmp_path.iterdir())
