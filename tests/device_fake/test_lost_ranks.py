"""The host waits for a device that waits for a rank that is lost: it hears so, by name, and ends the group."""

import signal
import threading
import time

import pytest
import torch
from fake_accelerator import fake_device
from fake_nccl import FakeNccl, fake_nccl, other_ranks
from schedules import in_a_thread_of_autograd

import megabucket as mb
from megabucket.ddp import distributed_data_parallel
from megabucket.ddp.step import GradSync
from megabucket.errors import PeerLostError, WrapperBrokenError
from megabucket.optim.norm import GlobalNorm

BROKEN_ELSEWHERE = WrapperBrokenError(step=1, rank=1, phase="optimizer", cause="KeyboardInterrupt: ")
QUICK = {"heartbeat_s": 0.1, "dead_after_s": 0.5}


def die(other):
    other.process = other.process._replace(start_ticks=1)  # its id belongs to another process by now


def leave(other):
    other.launches.last = 0
    other.stop()


def freeze(other):
    other._beat = lambda _: None


def break_off(other):
    other.post(BROKEN_ELSEWHERE)


LOSSES = pytest.mark.parametrize(
    ("lose", "kind", "text"),
    [
        (die, PeerLostError, "died: process"),
        (leave, PeerLostError, "left: its program ended"),
        (freeze, PeerLostError, "froze: no sign of life for 0.5 s"),
        (break_off, WrapperBrokenError, "KeyboardInterrupt"),
    ],
)


class Program:
    """One rank of two. The device comes to nothing any more from the moment it is told so."""

    def __init__(self, device, other, config, *, dtype=torch.float32, is_plain=True, has_scaler=False):
        self.device, self.other, self.dtype = device, other, dtype
        module = torch.nn.Linear(4, 4, dtype=dtype)
        module.register_buffer("mean", torch.zeros(4))  # of which a checkpoint takes the checksum
        self.ddp = mb.DistributedDataParallel(module, mb.DistributedDataParallelConfig(**QUICK, **config))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        if config.get("use_distributed_optimizer") or not is_plain:
            self.optimizer = mb.DistributedOptimizer(self.optimizer, self.ddp, clip_grad=1.0)
        self.scaler = torch.amp.GradScaler("cpu", enabled=has_scaler)

    def train(self):
        with self.ddp.step():
            self.scaler.scale(self.ddp(torch.ones(4, dtype=self.dtype)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def lose(self):
        self.device.is_stuck = True
        die(self.other)


@pytest.fixture
def program(monkeypatch):
    made = []

    def make(*, dtype=torch.float32, is_plain=True, has_scaler=False, **config):
        made.append(Program(device, others[0], config, dtype=dtype, is_plain=is_plain, has_scaler=has_scaler))
        made[-1].train()
        return made[-1]

    monkeypatch.setattr(FakeNccl, "num_aborts", 0)
    with fake_nccl(size=2), other_ranks() as others, fake_device(monkeypatch) as device:
        FakeNccl.device = device
        yield make
        for one in made:
            one.ddp.detach()


@LOSSES
@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}], ids=["all-reduce", "reduce-scatter"])
def test_a_lost_rank_ends_the_step_by_name(program, config, lose, kind, text):
    training = program(**config)
    training.device.is_stuck = True
    lose(training.other)

    with pytest.raises(kind, match=text) as caught:
        training.train()
    with pytest.raises(kind) as again:
        training.train()

    assert str(again.value) == str(caught.value)
    assert FakeNccl.num_aborts == 1


def test_a_rank_that_is_lost_behind_the_fence_is_missed_at_the_norm(program, monkeypatch):
    training, norm = program(use_distributed_optimizer=True), GlobalNorm.of

    def of(self, squares):
        training.lose()
        return norm(self, squares)

    monkeypatch.setattr(GlobalNorm, "of", of)

    with pytest.raises(PeerLostError, match="while waiting for grad norm"):
        training.train()
    assert FakeNccl.num_aborts == 1


NO_FENCE = {"fence": False}
HALF = {"dtype": torch.float16, "grad_reduce_in_fp32": False}


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        (NO_FENCE, "finite test"),
        (NO_FENCE | {"nonfinite_gradients": "allow", "is_plain": False}, "grad norm"),
        (NO_FENCE | {"nonfinite_gradients": "allow", "is_plain": False, "has_scaler": True}, "grad norm"),
        (NO_FENCE | {"use_distributed_optimizer": True, "nonfinite_gradients": "allow"}, "grad norm"),
    ],
    ids=["the finite test", "the norm of whole gradients", "a loss scaler", "the norm of shards"],
)
def test_without_a_fence_a_lost_rank_is_missed_at(program, fields, label):
    training = program(**fields)
    training.lose()

    with pytest.raises(PeerLostError, match=f"rank 1 died.*while waiting for {label}"):
        training.train()
    with pytest.raises(PeerLostError, match="rank 1 died"):
        training.train()
    assert FakeNccl.num_aborts == 1


@pytest.mark.parametrize("fence", [True, False])
def test_a_rank_that_is_lost_behind_the_fence_is_missed_at_the_test_of_float16_sums(program, monkeypatch, fence):
    training, conclude = program(fence=fence, **HALF), GradSync._conclude_whole

    def conclude_whole(self):
        training.lose()
        conclude(self)

    monkeypatch.setattr(GradSync, "_conclude_whole", conclude_whole)

    with pytest.raises(PeerLostError, match="while waiting for finite test"):
        training.train()


@pytest.mark.parametrize(
    "read",
    [
        lambda training, _: training.ddp.check_replicas(),
        lambda training, folder: mb.save_checkpoint(folder, training.ddp, training.optimizer, step=1),
        lambda training, folder: mb.Checkpointer(folder, training.ddp, training.optimizer, asynchronous=True).save(1),
    ],
    ids=["check_replicas", "save_checkpoint", "save in the background"],
)
@pytest.mark.parametrize("is_sharded", [True, False], ids=["reduce-scatter", "all-reduce"])
def test_a_rank_that_is_lost_while_parameters_come_is_missed_by_what_reads_them(
    program, monkeypatch, tmp_path, read, is_sharded
):
    training = program(use_distributed_optimizer=is_sharded)
    finish = mb.DistributedDataParallel.finish_param_sync

    def finish_param_sync(self):
        training.lose()
        finish(self)

    monkeypatch.setattr(mb.DistributedDataParallel, "finish_param_sync", finish_param_sync)

    with pytest.raises(PeerLostError, match="rank 1 died"):
        read(training, tmp_path)
    assert FakeNccl.num_aborts == 1


def test_a_rank_that_is_lost_in_the_first_broadcast_is_missed_at_its_end(monkeypatch):
    with fake_nccl(size=2), other_ranks() as others, fake_device(monkeypatch) as device:
        FakeNccl.device = device

        def lose(*_):
            device.is_stuck = True
            die(others[0])

        monkeypatch.setattr(distributed_data_parallel, "broadcast_replica", lose)

        with pytest.raises(PeerLostError, match="while waiting for initial broadcast"):
            mb.DistributedDataParallel(torch.nn.Linear(4, 4), mb.DistributedDataParallelConfig(**QUICK))


@pytest.mark.parametrize("call", ["check_replicas", "broadcast_params"])
def test_a_rank_that_does_not_come_to_a_call_is_named(program, call):
    training = program()
    training.lose()

    with pytest.raises(PeerLostError, match="rank 1 died"):
        getattr(training.ddp, call)()
    with pytest.raises(PeerLostError, match="rank 1 died"):
        training.train()


def test_an_interrupt_ends_the_wait_of_an_optimizer_and_the_group(program):
    training = program(use_distributed_optimizer=True)
    training.device.is_stuck = True
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()

    with pytest.raises(KeyboardInterrupt):
        training.train()
    with pytest.raises(WrapperBrokenError, match=r"rank 0.*KeyboardInterrupt"):
        training.train()

    assert FakeNccl.num_aborts == 1
    deadline_s = time.monotonic() + 10.0  # a thread writes it
    while (finding := training.other.ask(5.0).finding) is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert "KeyboardInterrupt" in str(finding)  # which is what the other ranks raise


def test_an_interrupt_is_served_when_a_backward_that_waits_in_a_thread_of_autograd_has_ended(program):
    """On a device the callback at the end of a backward runs there, while the caller's thread is in C++."""
    training = program()
    training.device.is_stuck = True
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    threading.Timer(0.8, lambda: setattr(training.device, "is_stuck", False)).start()
    loss = training.ddp(torch.ones(4)).sum()

    with pytest.raises(KeyboardInterrupt):
        in_a_thread_of_autograd(training.device, loss.backward)
    assert not training.device.is_stuck
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.train()

    assert FakeNccl.num_aborts == 0


def test_a_wait_that_takes_long_without_a_loss_goes_on(program):
    training = program()
    training.device.is_stuck = True
    threading.Timer(0.4, lambda: setattr(training.device, "is_stuck", False)).start()

    training.train()

    assert FakeNccl.num_aborts == 0
