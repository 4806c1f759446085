"""A report comes back as it was sent, and fits its record whatever the names are."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.ddp.report import RECORD_BYTES, Problem, RankReport

FAILURE = Problem("PeerFailedError", {"phase": "forward", "cause": "ValueError: boom"})
FULL = RankReport(
    rank=3,
    doing="save_checkpoint()",
    sent_buckets=True,
    problems=(
        FAILURE,
        Problem("StorageMovedError", {"params": ["a"], "found": "f", "expected": "e"}),
        Problem("LateGradientError", {"params": ["a", "b"], "bucket": 2, "num_buckets": 4, "phase": "in flight"}),
    ),
    fingerprint=6,
    step_number=10,
    num_microbatches=2,
    num_skipped_forwards=1,
    num_dropped_steps=4,
    num_updates=5,
    missed_update="x",
    num_loads=7,
    kept=("e", "f"),
    hyperparameters=(),
    is_committing=True,
    force_all_reduce=True,
)

counts = st.integers(-(2**62), 2**62)
texts = st.text(max_size=30)
names = st.lists(texts, max_size=4).map(tuple)
reports = st.builds(
    RankReport,
    rank=st.integers(0, 10**6),
    doing=texts,
    sent_buckets=st.booleans(),
    problems=st.lists(
        st.builds(Problem, texts, st.dictionaries(texts, texts | counts | names.map(list), max_size=4)), max_size=3
    ).map(tuple),
    fingerprint=counts,
    step_number=counts,
    num_microbatches=counts,
    num_skipped_forwards=counts,
    num_dropped_steps=counts,
    num_updates=counts,
    missed_update=texts,
    num_loads=counts,
    kept=names,
    hyperparameters=st.just(()),
    is_committing=st.booleans(),
    force_all_reduce=st.booleans(),
)


def failed(cause):
    return RankReport(0, problems=(Problem("PeerFailedError", {"phase": "forward", "cause": cause}),))


def unused(params):
    return RankReport(0, problems=(Problem("UnusedParameterError", {"params": list(params), "bucket": 0}),))


def sent(report):
    """The report as the others read it."""
    return RankReport.from_bytes(report.to_bytes())


@given(report=reports)
def test_a_short_report_comes_back_as_it_was_sent(report):
    assert sent(report) == report


@pytest.mark.parametrize("report", [FULL, RankReport(rank=0)], ids=["full", "empty"])
def test_a_report_comes_back_with_every_field_of_its_type(report):
    again = sent(report)

    assert again == report
    assert repr(again) == repr(report)  # tells True from 1, and tuples from lists


def test_what_json_does_not_know_is_sent_as_text():
    """Whatever has got into it: the other ranks wait for this report."""
    report = sent(RankReport(1, step_number=np.int64(5), num_loads=1 + 2j))

    assert (report.rank, report.step_number, report.num_loads) == (1, "5", "(1+2j)")


def test_the_record_is_json_without_spaces():
    payload = FULL.to_bytes()

    assert payload == json.dumps(json.loads(payload), separators=(",", ":")).encode()
    assert json.loads(payload)["problems"][0] == ["PeerFailedError", {"phase": "forward", "cause": "ValueError: boom"}]


def test_numbers_of_an_update_are_sent_as_texts():
    report = sent(RankReport(1, hyperparameters=((("lr of group 0", 0.5), ("clip_grad", 1.0)),)))

    assert report.hyperparameters == ("lr of group 0=0.5", "clip_grad=1.0")


def unused_after(params):
    """The names that arrive, of those that are sent."""
    return sent(unused(params)).problems[0].fields["params"]


def test_1024_names_are_sent_and_of_more_the_first_and_their_number():
    names = [f"p{index}" for index in range(1_025)]

    assert unused_after(names[:1_024]) == names[:1_024]
    assert unused_after(names) == [*names[:1_024], "... 1025 in all"]


def test_names_that_do_not_fit_are_halved_until_they_do():
    names = [f"{index:05}" * 10 for index in range(1_000)]  # 50 characters, 53 bytes with quotes and comma

    # 1,000 and 512 names of 53 bytes are more than 16,384; 256 are 13,568.
    assert unused_after(names) == [*names[:256], "... 1000 in all"]


def test_a_name_of_200_characters_is_sent_as_it_is():
    assert unused_after(["x" * 200, "y" * 201]) == ["x" * 200, "y" * 200 + "..."]


def test_a_text_is_cut_to_2000_characters():
    assert sent(failed("x" * 2_001)).problems[0].fields == {"phase": "forward", "cause": "x" * 2_000}


def test_a_text_that_takes_many_bytes_shrinks_until_the_report_fits():
    text = "\x00" * 100_000

    again = sent(RankReport(0, problems=(Problem("PeerFailedError", {"phase": text, "cause": text}),)))

    # Two texts of 6 bytes per character: 2,000 and 2,000 are too many, 16 * 64 fit.
    assert again.problems[0].fields == {"phase": "\x00" * 1_024, "cause": "\x00" * 1_024}


def test_a_record_may_be_full_to_the_last_byte():
    names = ["x" * 150] * 104
    spare = RECORD_BYTES - len(unused([*names, ""]).to_bytes())
    assert 0 < spare < 199

    assert len(unused([*names, "y" * spare]).to_bytes()) == RECORD_BYTES
    assert unused_after([*names, "y" * spare]) == [*names, "y" * spare]
    assert len(unused_after([*names, "y" * (spare + 1)])) < len(names)


HOSTILE = ["\x00", '"', "\\", "\n", "é", "\N{GRINNING FACE}", "\ud800"]


@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
def test_hostile_names_and_texts_fit_the_record_and_come_back_from_their_beginning(char):
    long = tuple(char * 1_000 + str(index) for index in range(3_000))
    report = RankReport(1, problems=(*failed(char * 10**6).problems, *unused(long).problems))

    payload = report.to_bytes()
    cause, params = (fields for _, fields in RankReport.from_bytes(payload).problems)

    assert len(payload) <= RECORD_BYTES
    assert (char * 10**6).startswith(cause["cause"])
    assert len(cause["cause"]) >= 40
    assert long[0].startswith(params["params"][0].removesuffix("..."))
    assert params["params"][-1] == "... 3000 in all"


def full_of(char):
    """Every fault at once, with long names and texts everywhere."""
    names, text = [char * 1_000 + str(index) for index in range(3_000)], char * 100_000
    return RankReport(
        1,
        problems=(
            Problem("PeerFailedError", {"phase": text, "cause": text}),
            Problem("StorageMovedError", {"params": names, "found": text, "expected": text}),
            Problem("LateGradientError", {"params": names, "bucket": 0, "num_buckets": 1, "phase": text}),
            Problem("UnusedParameterError", {"params": names, "bucket": 0}),
            Problem("NonFiniteGradientError", {"param": text, "bucket": 0, "num_buckets": 1, "finding": text, "num_others": 0}),
        ),
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
def test_a_report_with_every_fault_and_hostile_names_everywhere_fits_the_record(char):
    payload = full_of(char).to_bytes()
    again = RankReport.from_bytes(payload)

    assert len(payload) <= RECORD_BYTES
    *shown, count = again.problems[1].fields["params"]
    assert count == "... 3000 in all"
    assert len(shown) >= 5
    assert all(set(name) == {*char, "."} and len(name) >= 23 for name in shown)
    assert len(again.problems[4].fields["finding"]) >= 40


@pytest.mark.timeout(60)
@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
def test_a_report_with_every_fault_fits_the_smallest_record(char):
    payload = full_of(char).to_bytes(4_096)

    assert len(payload) <= 4_096
    assert RankReport.from_bytes(payload).problems[3].fields["params"][-1] == "... 3000 in all"


def test_at_least_five_names_are_sent_and_as_much_of_them_as_fits():
    face = "\N{GRINNING FACE}"  # 12 bytes in JSON

    *shown, count = sent(full_of(face)).problems[3].fields["params"]

    assert count == "... 3000 in all"
    assert len(shown) == 5
    assert len({len(name) for name in shown}) == 1
    # The next longer names, four characters more a name and text, would not have fitted.
    assert len(full_of(face).to_bytes()) > RECORD_BYTES // 2


def test_names_shrink_with_their_number():
    names = [f"{index:02}" + "\x00" * 300 for index in range(16)]  # 6 bytes for each zero byte in JSON

    # 16 names of 200 characters do not fit, of 8 * 16 they do.
    assert unused_after(names) == [name[:128] + "..." for name in names]
