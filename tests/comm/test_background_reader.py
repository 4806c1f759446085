"""How the thread that reads ends: not before its last works are done, unless ranks are lost."""

import threading

import pytest
import torch

from megabucket.comm.background_reader import BackgroundReader
from megabucket.comm.plan import InBackground
from megabucket.comm import AllReduce


class Wires:
    """Those of a rank whose peer says nothing before ``speaks`` is set, and nothing at all after ``close``."""

    def __init__(self):
        self.speaks, self.is_closed = threading.Event(), False

    def listen(self):
        return True

    def ring(self):
        pass

    def close(self):
        self.is_closed = True
        self.speaks.set()

    def exchange(self, words):
        self.speaks.wait()
        if self.is_closed:
            raise ConnectionError
        return [words, words]


@pytest.fixture
def wires():
    return Wires()


@pytest.fixture
def reader(wires):
    reader = BackgroundReader(None, wires, rank=0, size=2)
    reader._read = lambda batch: wires.exchange([len(batch.calls)])
    return reader


def batch():
    return InBackground([AllReduce(torch.zeros(4))])


def test_the_end_waits_for_a_rank_that_comes_late(reader, wires):
    work = reader.start(batch())
    threading.Timer(0.2, wires.speaks.set).start()

    reader.stop()

    assert work.wait()
    assert wires.is_closed


def test_the_end_waits_for_nobody_when_ranks_are_lost(reader, wires):
    work = reader.start(batch())

    reader.give_up()
    reader.stop()

    assert wires.is_closed
    with pytest.raises(RuntimeError, match=r"Connection closed by peer|was destroyed"):
        work.wait()


def test_who_takes_no_more_still_does_what_was_started(reader, wires):
    work = reader.start(batch())

    reader.finish()
    late = reader.start(batch())
    wires.speaks.set()

    assert work.wait()
    with pytest.raises(RuntimeError, match="was destroyed"):
        late.wait()
    reader.join(10.0)
    assert wires.is_closed


def test_a_reader_that_never_read_ends_at_once(reader, wires):
    reader.stop()
    reader.stop()

    assert wires.is_closed
