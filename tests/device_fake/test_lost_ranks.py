"""The host waits for a device that waits for a rank that is lost: it hears so, by name, and ends the group."""

import signal
import threading
import time

import pytest
import torch
from fake_accelerator import fake_device
from fake_nccl import FakeNccl, fake_nccl, other_ranks

import megabucket as mb
from megabucket.errors import PeerLostError, WrapperBrokenError
from megabucket.optim.norm import GlobalNorm

BROKEN_ELSEWHERE = WrapperBrokenError(step=1, rank=1, phase="optimizer", cause="KeyboardInterrupt: ")
QUICK = {"heartbeat_s": 0.1, "dead_after_s": 0.5}


def die(other):
    other.process = other.process._replace(start_ticks=1)  # its id belongs to another process by now


def leave(other):
    other.num_launched = 0
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

    def __init__(self, device, other, config):
        self.device, self.other = device, other
        self.ddp = mb.DistributedDataParallel(torch.nn.Linear(4, 4), mb.DistributedDataParallelConfig(**QUICK, **config))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        if config.get("use_distributed_optimizer"):
            self.optimizer = mb.DistributedOptimizer(self.optimizer, self.ddp, clip_grad=1.0)

    def train(self):
        with self.ddp.step():
            self.ddp(torch.ones(4)).sum().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def program(monkeypatch):
    made = []

    def make(**config):
        made.append(Program(device, others[0], config))
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
        training.device.is_stuck = True
        die(training.other)
        return norm(self, squares)

    monkeypatch.setattr(GlobalNorm, "of", of)

    with pytest.raises(PeerLostError, match="while waiting for grad norm"):
        training.train()
    assert FakeNccl.num_aborts == 1


@pytest.mark.parametrize("call", ["check_replicas", "broadcast_params"])
def test_a_rank_that_does_not_come_to_a_call_is_named(program, call):
    training = program()
    training.device.is_stuck = True
    die(training.other)

    with pytest.raises(PeerLostError, match="rank 1 died"):
        getattr(training.ddp, call)()
    with pytest.raises(PeerLostError, match="rank 1 died"):
        training.train()


def test_an_interrupt_ends_the_wait_and_the_group(program):
    training = program()
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


def test_a_wait_that_takes_long_without_a_loss_goes_on(program):
    training = program()
    training.device.is_stuck = True
    threading.Timer(0.4, lambda: setattr(training.device, "is_stuck", False)).start()

    training.train()

    assert FakeNccl.num_aborts == 0
