"""What ranks write into the store can be read again, and what others write there is no sign of anything."""

import pytest

from megabucket.comm.liveness import ProcessIdentity
from megabucket.comm.liveness import Beat, Finding, decode_beat, decode_finding

BEAT = Beat(
    process=ProcessIdentity("node (1)", 4711, 99, "boot pid:[1]"),
    count=3,
    every_s=0.5,
    step=12,
    phase="backward",
    bucket=2,
    num_launched=40,
    at_s=1.5,
    has_left=False,
)
FINDING = Finding(ranks=(1, 2), states=("died", "froze"), during="noticed", recorder="Last collectives: #1.")


def test_a_beat_survives_the_store():
    assert decode_beat(BEAT.encode().encode()) == BEAT


def test_a_finding_survives_the_store():
    assert decode_finding(FINDING.encode().encode()) == FINDING


@pytest.mark.parametrize("raw", [b"", b"\xff", b"7", b"null", b"{}", b"[]", b'{"ranks": [1]}', b'[["a", 1], 2]', b"[1, 2]"])
def test_anything_else_is_no_sign(raw):
    assert decode_beat(raw) is None
    assert decode_finding(raw) is None


def test_a_finding_that_has_not_one_state_per_rank_is_none():
    assert decode_finding(b'{"ranks": [1], "states": [], "during": "", "recorder": ""}') is None


def test_a_place_names_phase_step_and_bucket():
    assert BEAT.place == "backward, step 12, bucket 2"


def test_the_error_of_a_finding_is_a_fresh_one_each_time():
    first, second = FINDING.error(), FINDING.error()

    assert first is not second
    assert str(first) == str(second)
    assert str(first).startswith("rank 1 died; rank 2 froze (noticed). The process group cannot be used any more")
    assert str(first).endswith("Last collectives: #1.")
