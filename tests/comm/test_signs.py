"""What ranks write into the store can be read again."""

import json

import pytest

from megabucket.comm.liveness.heartbeat import decode_beat, decode_finding, encode_finding
from megabucket.comm.liveness.observations import Beat, ProcessIdentity
from megabucket.errors import PeerLostError, WrapperBrokenError

BEAT = Beat(
    process=ProcessIdentity("node (1)", 4711, 99, "boot pid:[1]"),
    number=3,
    every_s=0.5,
    step=12,
    phase="backward",
    bucket=2,
    num_launched=40,
    has_left=False,
)
FINDINGS = [
    PeerLostError(ranks=(1, 2), states=("died", "froze"), during="noticed"),
    WrapperBrokenError(step=12, rank=1, phase="update", cause="KeyboardInterrupt"),
    WrapperBrokenError(step=12, rank=None, phase="setup", cause="ranks wait for one another"),
]


def test_a_beat_survives_the_store():
    assert decode_beat(json.dumps(BEAT).encode()) == BEAT


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: type(finding).__name__)
def test_a_finding_survives_the_store(finding):
    found = decode_finding(encode_finding(finding).encode())

    assert type(found) is type(finding)
    assert found.to_dict() == finding.to_dict()


def test_a_place_names_phase_step_and_bucket():
    assert BEAT.place == "backward, step 12, bucket 2"
    assert BEAT._replace(bucket=-1).place == "backward, step 12"
