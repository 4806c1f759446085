"""What ranks say to each other arrives whole on all of them, and ranks that do different things learn so together."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.comm import AllGather, AllReduce, Communicator, Exchange, Gate, LocalCommunicator, exchange
from megabucket.errors import CollectiveError
from megabucket.testing import ListRecorder, LoopbackWorld

CPU = torch.device("cpu")
NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 2**62 - 1))  # small ones, so that ranks are often alike
PAYLOADS = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


def on_ranks(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    world = LoopbackWorld(size)
    return world.run(lambda rank: function(world.communicator(rank)))


class TestGate:
    @given(
        said=st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 2**31), st.booleans()), min_size=1, max_size=6),
    )
    def test_all_ranks_hear_whether_all_said_the_same_the_largest_flag_and_whether_one_has_nonfinite(self, said):
        world = LoopbackWorld(len(said))
        gates = [Gate(world.communicator(rank), device=CPU) for rank in range(len(said))]

        for gate, (kind, fingerprint, flag, nonfinite) in zip(gates, said, strict=True):
            gate.send(kind, fingerprint, flag=flag, label="fence", nonfinite=torch.tensor(nonfinite))
        answers = [gate.take() for gate in gates]

        is_alike = len({(kind, fingerprint) for kind, fingerprint, *_ in said}) == 1
        flag, nonfinite = max(flag for *_, flag, _ in said), any(nonfinite for *_, nonfinite in said)
        assert answers == [(is_alike, flag, nonfinite)] * len(said)

    def test_messages_do_not_follow_torch_s_default_device(self):
        world = LoopbackWorld(2)
        gates = [Gate(world.communicator(rank), device=CPU) for rank in range(2)]

        with torch.device("meta"):
            for gate in gates:
                gate.send(1, 2, flag=3, label="fence")

        assert [gate.take() for gate in gates] == [(True, 3, False)] * 2

    @given(messages=st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=5))
    def test_one_message_leaves_nothing_for_the_next(self, messages):
        world = LoopbackWorld(2)
        gates = [Gate(world.communicator(rank), device=CPU) for rank in range(2)]

        for of_ranks in messages:
            for gate, number in zip(gates, of_ranks, strict=True):
                gate.send(7, number, flag=number, label="fence")
            expected = (of_ranks[0] == of_ranks[1], max(of_ranks), False)
            assert [gate.take() for gate in gates] == [expected] * 2

    def test_ranks_in_different_calls_meet_and_stay_aligned(self):
        def opens(communicator: Communicator) -> list[bool]:
            gate, heard = Gate(communicator, device=CPU), []
            for kinds in ((1, 2), (5, 5)):
                gate.send(kinds[communicator.rank], 0, flag=0, label=f"call {kinds[communicator.rank]}")
                heard.append(gate.take().is_alike)
            return heard

        assert on_ranks(2, opens) == [[False, True]] * 2

    def test_a_message_is_under_way_from_sending_to_taking(self):
        world = LoopbackWorld(2)
        gates = [Gate(world.communicator(rank), device=CPU) for rank in range(2)]

        seen = [gates[0].is_sent]
        for gate in gates:
            gate.send(1, 1, flag=0, label="fence")
        seen.append(gates[0].is_sent)
        gates[0].take()
        seen.append(gates[0].is_sent)

        assert seen == [False, True, False]
        with pytest.raises(CollectiveError, match="no message whose answer could be taken"):
            gates[0].take()

    def test_one_rank_is_always_alike(self):
        gate = Gate(LocalCommunicator(), device=CPU)

        gate.send(3, 4, flag=5, label="fence", nonfinite=torch.tensor(2.0))

        assert gate.take() == (True, 5, True)


class TestExchange:
    @given(payloads=PAYLOADS, spare_bytes=st.integers(0, 9))
    def test_every_rank_hears_every_payload(self, payloads, spare_bytes):
        world = LoopbackWorld(len(payloads))
        capacity_bytes = max(map(len, payloads)) + spare_bytes

        exchanges = [
            Exchange(world.communicator(rank), payload, capacity_bytes=capacity_bytes, device=CPU, label="reports")
            for rank, payload in enumerate(payloads)
        ]
        assert world.schedule(0) == ()  # nothing before the start
        for one in exchanges:
            one.start()
            one.start()

        assert [one.wait() for one in exchanges] == [payloads] * len(payloads)
        assert len(world.schedule(0)) == (1 if len(payloads) > 1 else 0)

    def test_what_does_not_fit_is_refused_before_anything_is_sent(self):
        world = LoopbackWorld(2)

        with pytest.raises(ValueError, match=r"^reports: 5 bytes do not fit into 4$"):
            Exchange(world.communicator(0), b"12345", capacity_bytes=4, device=CPU, label="reports")

        assert world.schedule(0) == ()

    @given(length=st.binary(min_size=8, max_size=8))
    def test_no_length_reaches_beyond_the_row_it_stands_in(self, length):
        world = LoopbackWorld(2)
        own = Exchange(world.communicator(0), b"ours", capacity_bytes=6, device=CPU, label="reports")
        rows = torch.frombuffer(bytearray(bytes(14) + length + b"abcdef"), dtype=torch.uint8)

        own.start()
        world.communicator(1).control.launch([AllGather(rows, rows[14:])], label="reports")

        assert own.wait() == [b"ours", b"abcdef"[: int.from_bytes(length, "little")]]


class TestAnyLength:
    @given(payloads=PAYLOADS)
    def test_every_rank_hears_every_payload_of_whatever_length(self, payloads):
        said = on_ranks(len(payloads), lambda own: exchange(own, payloads[own.rank], device=CPU, label="names"))

        assert said == [payloads] * len(payloads)

    @given(payloads=PAYLOADS, data=st.data())
    def test_only_speakers_are_heard_in_their_order_and_all_ranks_hear_them(self, payloads, data):
        ranks = list(range(len(payloads)))
        speakers = data.draw(st.lists(st.sampled_from(ranks), unique=True))

        said = on_ranks(
            len(payloads), lambda own: exchange(own, payloads[own.rank], device=CPU, label="names", speakers=speakers)
        )

        assert said == [[payloads[speaker] for speaker in speakers]] * len(payloads)

    def test_ranks_that_are_no_speakers_cost_nothing(self):
        recorder = ListRecorder()
        world = LoopbackWorld(4)

        def say(rank: int) -> None:
            own = world.communicator(rank, recorder if rank == 0 else None)
            exchange(own, b"x" * (3 if rank == 2 else 1000), device=CPU, label="lines", speakers=[2])

        world.run(say)

        assert [(one.label, one.payload_bytes) for one in recorder.collectives] == [("lines length", 8), ("lines", 8 + 3)]

    @pytest.mark.parametrize("speakers", [None, [1, 0]])
    def test_a_payload_that_is_too_long_is_an_error_on_every_rank(self, speakers):
        def say(own: Communicator) -> str:
            with pytest.raises(CollectiveError) as caught:
                exchange(own, b"x" * (11 if own.rank == 1 else 2), device=CPU, label="names", speakers=speakers)
            return str(caught.value)

        with mock.patch.object(import_module("megabucket.comm.exchange"), "_MOST_BYTES", 10):
            texts = on_ranks(3, say)

        assert texts == ["names: a rank sends 11 bytes; the limit is 10"] * 3

    def test_what_ranks_say_never_meets_their_data(self):
        """The first rank has a collective on data under way while they speak; the second one launches it afterwards."""

        def speak(own: Communicator) -> tuple[list[bytes], float]:
            data = torch.ones(1)
            early = own.launch([AllReduce(data)], label="bucket 0") if own.rank == 0 else None
            said = exchange(own, bytes([own.rank]), device=CPU, label="names")
            (early or own.launch([AllReduce(data)], label="bucket 0")).wait()
            return said, data.item()

        assert on_ranks(2, speak) == [([b"\0", b"\1"], 2.0)] * 2
