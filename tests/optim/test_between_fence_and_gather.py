"""A rank that fails or is interrupted behind the fence: the others run norm and gather meanwhile, so it runs them, too."""

from contextlib import suppress
from types import MappingProxyType

import pytest
import torch

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, save_checkpoint
from megabucket.comm import Communicator, Handle
from megabucket.ddp.patience import insist
from megabucket.errors import CollectiveError, MegabucketError, PeerFailedError, PhaseError, ReplicasDivergedError
from megabucket.testing import LoopbackWorld

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
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

    def __init__(self, inner):
        super().__init__(rank=inner.rank, size=inner.size)
        self._inner = inner
        self.label, self.interrupt = "", None

    def _launch(self, calls, label):
        return InterruptedHandle(self, self._inner.launch(calls, label=label), label)


class InterruptedHandle(Handle):
    def __init__(self, owner, inner, label):
        self._owner, self._inner, self._label = owner, inner, label

    def wait(self):
        if self._label == self._owner.label:
            self._owner.label = ""
            raise self._owner.interrupt
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
                ddp(rank + 1.0).backward() if not in_block else None
                if rank == FAULTY:
                    before(index, ddp, optimizer)
                try:
                    if in_block:
                        with ddp.step():
                            ddp(rank + 1.0).backward()
                            optimizer.step()
                    else:
                        optimizer.step()
                    seen.append(None)
                except BaseException as error:
                    seen.append((type(error), str(error)))
                optimizer.zero_grad()
            ddp.finish_param_sync()
            return seen, ddp.module.a[0].item(), str(ddp.last_error)

        return self.world.run(play)


def no_memory(*_):
    raise MemoryError("no memory")


class Failing(dict):
    """The shards of each bucket group, whom nobody can look at: an interrupt, while squares are taken."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __getitem__(self, _):
        raise self.error


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("where", "optimizer_fields"),
    [
        *[(where, {"clip_grad": 1e9}) for where in ("squares", "reload", "gradients", "norm")],
        ("reload", {"returns_grad_norm": False}),  # before the fence, as nothing behind it could keep others from updating
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failure_before_the_norm_drops_the_step_on_all_ranks(where, optimizer_fields, in_block, overlap, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True, overlap_param_gather=overlap)

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index != 1:
            return
        if where == "squares":
            monkeypatch.setattr(optimizer.sharding, "shards_of_group", Failing(MemoryError("no memory")))
        elif where == "reload":
            optimizer._num_value_changes -= 1  # as after a load
            monkeypatch.setattr(optimizer, "reload_main_params", no_memory)
        elif where == "gradients":
            monkeypatch.setattr(optimizer._shards[0], "load_grad", no_memory)
        else:
            monkeypatch.setattr(optimizer._global_norm, "add", no_memory)

    told = f"step 1: rank 1 failed in optimizer.step(): MemoryError: no memory. {DROPPED}"
    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=in_block, before=before)):
        own = (MemoryError, "no memory") if rank == FAULTY and not in_block else (PeerFailedError, told)
        assert seen == [None, own, None]
        assert last_error == told
        assert weight == -4.0  # the mean of 1, 2, 3, in two steps


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_a_norm_a_failure_behind_the_fence_is_one_of_the_update(in_block, overlap, monkeypatch):
    """Nothing is left then that could fail but the widening of gradients. The others have updated, and are told next time."""
    ranks = Ranks(optimizer_fields={"returns_grad_norm": False}, use_distributed_optimizer=True, overlap_param_gather=overlap)

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index == 1:
            monkeypatch.setattr(optimizer._shards[0], "load_grad", no_memory)

    told = (
        "step 2: rank 1 failed in optimizer: MemoryError: no memory. Its shard of the parameters may miss the update, or half "
        "of it: load the last checkpoint on every rank."
    )
    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=in_block, before=before, num_steps=4)):
        failed = (MemoryError, "no memory") if rank == FAULTY else None
        assert seen == [None, failed, (PeerFailedError, told), None]
        assert last_error == told
        assert weight == -6.0  # the first element is rank 0's, which has updated in three of the four steps


def test_without_a_norm_an_alarm_while_gradients_are_widened_keeps_nobody_from_the_update(monkeypatch):
    ranks = Ranks(torch.bfloat16, {"returns_grad_norm": False}, use_distributed_optimizer=True, grad_reduce_in_fp32=False)

    def before(index, _, optimizer):
        shard = optimizer._shards[0]
        load_grad = shard.load_grad

        def once():
            monkeypatch.undo()
            load_grad()
            raise TimeoutError("alarm")

        if index == 1:
            monkeypatch.setattr(shard, "load_grad", once)

    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=False, before=before)):
        assert seen == [None, (TimeoutError, "alarm") if rank == FAULTY else None, None]
        assert (last_error, weight) == ("None", -6.0)


@pytest.mark.parametrize("optimizer_fields", [{}, {"returns_grad_norm": False}], ids=["norm", "no norm"])
def test_without_a_fence_a_failure_before_the_norm_updates_nobody_and_leaves_ranks_in_step(optimizer_fields, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True, fence=False)

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index == 1:
            optimizer._num_value_changes -= 1  # as after a load
            monkeypatch.setattr(optimizer, "reload_main_params", no_memory)

    for rank, (seen, weight, _) in enumerate(ranks.steps(in_block=False, before=before)):
        assert seen == [None, (MemoryError, "no memory") if rank == FAULTY else None, None]
        assert weight == -4.0


@pytest.mark.parametrize("optimizer_fields", [{}, {"returns_grad_norm": False}], ids=["norm", "no norm"])
def test_a_second_step_on_the_same_gradients_ends_no_step_of_the_others_whatever_else_is_wrong(optimizer_fields, monkeypatch):
    ranks = Ranks(optimizer_fields=optimizer_fields, use_distributed_optimizer=True)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        for index in range(3):
            ddp(1.0).backward()
            optimizer.step()
            if rank == FAULTY and index == 1:
                optimizer._num_value_changes -= 1  # as after a load
                monkeypatch.setattr(optimizer, "reload_main_params", no_memory)
                with pytest.raises(PhaseError, match="called twice"):
                    optimizer.step()
                monkeypatch.undo()
            optimizer.zero_grad()
        ddp.finish_param_sync()
        return ddp.module.a[0].item(), ddp.last_error

    assert ranks.world.run(play) == [(-3.0, None)] * SIZE


@pytest.mark.parametrize("where", ["gradients", "update"])
def test_ctrl_c_is_raised_also_where_the_gather_behind_it_fails(where, monkeypatch):
    ranks = Ranks(optimizer_fields={"returns_grad_norm": False}, use_distributed_optimizer=True)

    def interrupt(*_):
        raise KeyboardInterrupt

    def lose_peers():
        raise CollectiveError("the others are gone")

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        ddp(1.0).backward()
        if rank == FAULTY:
            monkeypatch.setattr(ddp, "start_param_sync", lose_peers)
            if where == "gradients":
                monkeypatch.setattr(optimizer._shards[0], "load_grad", interrupt)
            else:
                optimizer.torch_optimizer.step = interrupt
        try:
            optimizer.step()
        except BaseException as error:
            return type(error)
        return None

    assert ranks.world.run(play)[FAULTY] is KeyboardInterrupt


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("label", "overlap"),
    [
        *[(label, overlap) for label in ("bucket 0", "fence", "grad norm") for overlap in (False, True)],
        ("param gather 0", False),  # with overlap the next forward waits for it
    ],
)
def test_a_wait_that_is_interrupted_does_not_keep_a_rank_from_its_update(label, in_block, overlap):
    interrupt = TimeoutError("alarm")
    ranks = Ranks(use_distributed_optimizer=True, overlap_param_gather=overlap)

    def before(index, ddp, _):
        if index == 1:
            ddp.communicator.label, ddp.communicator.interrupt = label, interrupt

    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=in_block, before=before)):
        assert seen == [None, (type(interrupt), str(interrupt)) if rank == FAULTY else None, None]
        assert last_error == "None"
        assert weight == -6.0


@pytest.mark.parametrize(("interrupt", "num_waits"), [(TimeoutError(), 2), (KeyboardInterrupt(), 1), (SystemExit(), 1)])
def test_what_ends_the_program_does_not_wait_again(interrupt, num_waits):
    waits = []

    def wait():
        waits.append(None)
        raise interrupt

    with pytest.raises(type(interrupt)):
        insist(wait)
    assert len(waits) == num_waits


INTERRUPTS = pytest.mark.parametrize("interrupt", [TimeoutError("alarm"), KeyboardInterrupt()], ids=["alarm", "Ctrl-C"])


@INTERRUPTS
def test_an_interrupt_while_squares_are_taken_is_told_to_the_others_and_raised(interrupt, monkeypatch):
    ranks = Ranks(use_distributed_optimizer=True)

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index == 1:
            monkeypatch.setattr(optimizer.sharding, "shards_of_group", Failing(interrupt))

    told = f"step 1: rank 1 failed in optimizer.step(): {type(interrupt).__name__}: {interrupt}. {DROPPED}"
    for rank, (seen, weight, last_error) in enumerate(ranks.steps(in_block=False, before=before)):
        assert seen == [None, (type(interrupt), str(interrupt)) if rank == FAULTY else (PeerFailedError, told), None]
        assert (last_error, weight) == (told, -4.0)


@INTERRUPTS
def test_an_interrupt_while_squares_are_taken_is_raised_where_the_step_is_skipped(interrupt, monkeypatch):
    ranks = Ranks(use_distributed_optimizer=True, nonfinite_gradients="skip_step")

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        ddp(torch.inf).backward()
        if rank == FAULTY:
            monkeypatch.setattr(optimizer.sharding, "shards_of_group", Failing(interrupt))
        try:
            return optimizer.step().updated
        except BaseException as error:
            return type(error)

    assert ranks.world.run(play) == [False, type(interrupt), False]


@pytest.mark.parametrize("where", ["fence", "squares"])
@INTERRUPTS
def test_a_wait_that_is_interrupted_hides_no_error_of_the_step(interrupt, where):
    """The fence that was interrupted does not hold. An alarm gives way to the error; Ctrl-C does not."""
    ranks = Ranks(use_distributed_optimizer=True, finish="explicit")

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        ddp(1.0).backward()
        ddp.finish_grad_sync()
        if rank == 0:
            ddp.abort_step("no")
            return str(ddp.last_error)
        if rank == FAULTY and where == "fence":
            ddp.communicator.label, ddp.communicator.interrupt = "fence", interrupt
        elif rank == FAULTY:
            optimizer.sharding.shards_of_group = Failing(interrupt)
        try:
            optimizer.step()
        except BaseException as error:
            return type(error), str(ddp.last_error)
        return None

    told = f"step 0: rank 0 failed in abort_step(): no. {DROPPED}"
    own = PeerFailedError if isinstance(interrupt, Exception) else KeyboardInterrupt
    assert ranks.world.run(play) == [told, (own, told), (PeerFailedError, told)]


def test_an_exchange_of_reports_that_is_interrupted_goes_on():
    ranks = Ranks(use_distributed_optimizer=True)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        if rank == 0:
            ddp.abort_step("no")
            return str(ddp.last_error)
        if rank == FAULTY:
            ddp.communicator.label, ddp.communicator.interrupt = "step report", TimeoutError("alarm")
        ddp(1.0).backward()
        with pytest.raises(PeerFailedError) as caught:
            optimizer.step()
        return str(caught.value)

    assert ranks.world.run(play) == [f"step 0: rank 0 failed in abort_step(): no. {DROPPED}"] * SIZE


def test_gradients_that_are_nan_are_still_no_error_where_they_are_allowed():
    """Every rank asks why the norm is nan, and none has failed."""
    ranks = Ranks(use_distributed_optimizer=True, nonfinite_gradients="allow")

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        results = []
        for x in (1.0, torch.nan if rank == FAULTY else 1.0, 1.0):
            ddp(x).backward()
            results.append(optimizer.step().updated)
            optimizer.zero_grad()
        return results, ddp.module.a[0].item(), ddp.last_error, ddp.sync.step

    assert ranks.world.run(play) == [([True, False, True], -2.0, None, 3)] * SIZE


def test_with_all_reduce_an_update_that_one_rank_has_missed_is_named_with_its_cause(monkeypatch):
    """There is nothing behind the fence that could keep the others from updating."""
    ranks = Ranks(dtype=torch.bfloat16)

    def before(index, _, optimizer):
        monkeypatch.undo()
        if index == 1:
            optimizer._num_value_changes -= 1  # as after a load
            monkeypatch.setattr(optimizer, "reload_main_params", no_memory)

    for rank, (seen, _, last_error) in enumerate(ranks.steps(in_block=True, before=before, num_steps=4)):
        assert seen[0] is None
        assert seen[1] == ((MemoryError, "no memory") if rank == FAULTY else None)
        assert seen[2] == (ReplicasDivergedError, last_error)
        assert "(rank 1 made none because of MemoryError: no memory) differ between ranks: 1 on ranks 0, 2; 0 on" in last_error
        assert seen[3] is None


def fail_once(optimizer, error):
    """Let the next update of the torch optimizer fail."""
    step = optimizer.torch_optimizer.step

    def fail():
        optimizer.torch_optimizer.step = step
        raise error

    optimizer.torch_optimizer.step = fail


@pytest.mark.parametrize("then", ["rebuild", "abort", "nothing"])
@pytest.mark.parametrize("sharded", [True, False])
def test_an_update_that_has_failed_is_told_by_the_next_fence_whatever_comes_between(then, sharded):
    ranks = Ranks(use_distributed_optimizer=sharded)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        seen = []
        for index in range(4):
            if index == 1 and rank == FAULTY:
                fail_once(optimizer, MemoryError("no memory"))
            try:
                ddp(1.0).backward()
                optimizer.step()
                seen.append(None)
            except Exception as error:
                seen.append(type(error))
                if then == "abort" and index == 1:
                    ddp.abort_step(f"{error}")
            optimizer.zero_grad()
            if then == "rebuild" and index == 1:
                ddp.rebuild()
        return seen, str(ddp.last_error)

    for rank, (seen, told) in enumerate(ranks.world.run(play)):
        assert seen == [None, MemoryError if rank == FAULTY else None, PeerFailedError, None]
        assert "rank 1 failed in optimizer: MemoryError: no memory" in told


@pytest.mark.parametrize("saves", ["state_dict", "save_checkpoint"])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_a_failed_update_has_left_is_not_saved(saves, sharded, tmp_path):
    """The others have updated: what is saved would be of no step."""
    ranks = Ranks(use_distributed_optimizer=sharded)

    def save(ddp, optimizer):
        if saves == "state_dict":
            optimizer.state_dict()
        else:
            save_checkpoint(tmp_path, ddp, optimizer, step=1)

    def play(rank):
        ddp, optimizer = ranks.wrapped[rank]
        seen = []
        for index in range(3):
            if index == 1 and rank == FAULTY:
                fail_once(optimizer, MemoryError("no memory"))
            with suppress(MemoryError, PeerFailedError):
                ddp(1.0).backward()
                optimizer.step()
            optimizer.zero_grad()
            if index:
                try:
                    save(ddp, optimizer)
                    seen.append("")
                except MegabucketError as error:
                    seen.append(f"{type(error).__name__}: {error}")
        return seen

    for after_failure, told in ranks.world.run(play):
        assert "after an update that failed on rank 1 (MemoryError: no memory)" in after_failure
        assert not told  # everybody has heard of it
