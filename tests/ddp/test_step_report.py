"""A report comes back as it was sent, and fits its record whatever the names are."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.ddp.fence import (
    RECORD_BYTES,
    Failure,
    LateGrads,
    ModelChange,
    NonFinite,
    StepReport,
    UnusedParams,
    record_bytes,
)

FULL = StepReport(
    rank=3,
    step_number=10,
    num_microbatches=2,
    num_skipped_forwards=1,
    num_dropped_steps=4,
    num_updates=5,
    checksum=6,
    num_loads=7,
    kept=("e", "f"),
    interrupted=("g",),
    hyperparameters=("lr of group 0=0.5",),
    is_committing=True,
    force_all_reduce=True,
    failure=Failure("forward", "ValueError: boom"),
    change=ModelChange("moved", params=("a",), found="f", expected="e", added=("b", "c"), removed=("d",)),
    late=LateGrads(("a", "b"), bucket=2, phase="in flight"),
    unused=UnusedParams(("c", "d"), bucket=3),
    nonfinite=NonFinite("a", bucket=1, finding="nan in 1 of 2 elements, first at [1]", num_others=5),
)

counts = st.integers(-(2**62), 2**62)
texts = st.text(max_size=30)
names = st.lists(texts, max_size=4).map(tuple)
reports = st.builds(
    StepReport,
    rank=st.integers(0, 10**6),
    step_number=counts,
    num_microbatches=counts,
    num_skipped_forwards=counts,
    num_dropped_steps=counts,
    num_updates=counts,
    checksum=counts,
    num_loads=counts,
    kept=names,
    interrupted=names,
    hyperparameters=names,
    is_committing=st.booleans(),
    force_all_reduce=st.booleans(),
    failure=st.none() | st.builds(Failure, texts, texts),
    change=st.none() | st.builds(ModelChange, texts, params=names, found=texts, expected=texts, added=names, removed=names),
    late=st.none() | st.builds(LateGrads, names, counts, texts),
    unused=st.none() | st.builds(UnusedParams, names, counts),
    nonfinite=st.none() | st.builds(NonFinite, texts, counts, texts, counts),
)


@given(report=reports)
def test_a_short_report_comes_back_as_it_was_sent(report):
    assert StepReport.from_bytes(report.to_bytes()) == report


@pytest.mark.parametrize("report", [FULL, StepReport(rank=0)], ids=["full", "empty"])
def test_a_report_comes_back_with_every_field_of_its_type(report):
    again = StepReport.from_bytes(report.to_bytes())

    assert again == report
    assert repr(again) == repr(report)  # tells True from 1, and tuples from lists
    assert hash(again) == hash(report)


def test_what_json_does_not_know_is_sent_as_text():
    """Whatever has got into it: the other ranks wait for this report."""
    report = StepReport.from_bytes(StepReport(1, step_number=np.int64(5), num_loads=1 + 2j).to_bytes())

    assert (report.rank, report.step_number, report.num_loads) == (1, "5", "(1+2j)")


def test_the_record_is_json_without_spaces():
    payload = FULL.to_bytes()

    assert payload == json.dumps(json.loads(payload), separators=(",", ":")).encode()
    assert json.loads(payload)["late"] == {"params": ["a", "b"], "bucket": 2, "phase": "in flight"}


def unused_after(params):
    """The names that arrive, of those that are sent."""
    return StepReport.from_bytes(StepReport(0, unused=UnusedParams(tuple(params), 0)).to_bytes()).unused.params


def test_1024_names_are_sent_and_of_more_the_first_and_their_number():
    names = [f"p{index}" for index in range(1_025)]

    assert unused_after(names[:1_024]) == tuple(names[:1_024])
    assert unused_after(names) == (*names[:1_024], "... 1025 in all")


def test_names_that_do_not_fit_are_halved_until_they_do():
    names = [f"{index:05}" * 10 for index in range(1_000)]  # 50 characters, 53 bytes with quotes and comma

    # 1,000 and 512 names of 53 bytes are more than 16,384; 256 are 13,568.
    assert unused_after(names) == (*names[:256], "... 1000 in all")


def test_a_name_of_200_characters_is_sent_as_it_is():
    assert unused_after(["x" * 200, "y" * 201]) == ("x" * 200, "y" * 200 + "...")


def test_a_text_is_cut_to_2000_characters():
    report = StepReport(0, failure=Failure("forward", "x" * 2_001))

    assert StepReport.from_bytes(report.to_bytes()).failure == Failure("forward", "x" * 2_000)


def test_a_text_that_takes_many_bytes_shrinks_until_the_report_fits():
    report = StepReport(0, failure=Failure("forward", "\x00" * 100_000), nonfinite=NonFinite("\x00" * 100_000, 0, "nan", 0))

    again = StepReport.from_bytes(report.to_bytes())

    # Two texts of 6 bytes per character: 2,000 and 2,000 are too many, 4 * 256 + 40 fit.
    assert again.failure.error == "\x00" * 1_064
    assert again.nonfinite == NonFinite("\x00" * 1_064, 0, "nan", 0)


def test_a_record_may_be_full_to_the_last_byte():
    names = ["x" * 150] * 104
    spare = RECORD_BYTES - len(StepReport(0, unused=UnusedParams((*names, ""), 0)).to_bytes())
    assert 0 < spare < 199

    assert len(StepReport(0, unused=UnusedParams((*names, "y" * spare), 0)).to_bytes()) == RECORD_BYTES
    assert unused_after([*names, "y" * spare]) == (*names, "y" * spare)
    assert len(unused_after([*names, "y" * (spare + 1)])) < len(names)


HOSTILE = ["\x00", '"', "\\", "\n", "é", "\N{GRINNING FACE}", "\ud800"]


@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
def test_hostile_names_and_texts_fit_the_record_and_come_back_from_their_beginning(char):
    long = tuple(char * 1_000 + str(index) for index in range(3_000))
    report = replace(StepReport(1), failure=Failure("forward", char * 10**6), unused=UnusedParams(long, bucket=2))

    payload = report.to_bytes()
    again = StepReport.from_bytes(payload)

    assert len(payload) <= RECORD_BYTES
    assert report.failure.error.startswith(again.failure.error)
    assert len(again.failure.error) >= 40
    assert long[0].startswith(again.unused.params[0].removesuffix("..."))
    assert again.unused.params[-1] == "... 3000 in all"


def full_of(char):
    """Every fault at once, with long names and texts everywhere."""
    names, text = tuple(char * 1_000 + str(index) for index in range(3_000)), char * 100_000
    return StepReport(
        1,
        failure=Failure(text, text),
        change=ModelChange(text, params=names, found=text, expected=text, added=names, removed=names),
        late=LateGrads(names, 0, text),
        unused=UnusedParams(names, 0),
        nonfinite=NonFinite(text, 0, text, 0),
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
def test_a_report_with_every_fault_and_hostile_names_everywhere_fits_the_record(char):
    payload = full_of(char).to_bytes()
    again = StepReport.from_bytes(payload)

    assert len(payload) <= RECORD_BYTES
    *shown, count = again.change.removed
    assert count == "... 3000 in all"
    assert len(shown) >= 5
    assert all(set(name) == {*char, "."} and len(name) >= 23 for name in shown)
    assert len(again.nonfinite.finding) >= 40


@pytest.mark.timeout(60)
@pytest.mark.parametrize("char", HOSTILE, ids=[f"U+{ord(char):04X}" for char in HOSTILE])
@pytest.mark.parametrize("num_ranks", [256, 1_024, 1_000_000])
def test_a_report_with_every_fault_fits_the_record_of_a_large_world(char, num_ranks):
    names, capacity_bytes = tuple(char * 1_000 + str(index) for index in range(3_000)), record_bytes(num_ranks)
    numbers = dict.fromkeys(
        ("rank", "step_number", "num_microbatches", "num_skipped_forwards", "num_dropped_steps", "num_updates", "num_loads"),
        2**62 - 1,
    )
    report = replace(full_of(char), kept=names, interrupted=names, hyperparameters=names, missed_update=char * 1_000, **numbers)

    payload = report.to_bytes(capacity_bytes)
    again = StepReport.from_bytes(payload)

    assert len(payload) <= capacity_bytes
    assert again.failure.error.startswith(char * 16)
    for list_of_names in (again.unused.params, again.late.params, again.change.added, again.kept, again.hyperparameters):
        assert list_of_names[0].startswith(char * 8)
        assert list_of_names[-1] == "... 3000 in all"


def test_a_record_is_smaller_the_more_ranks_there_are_but_never_too_small():
    sizes = [record_bytes(num_ranks) for num_ranks in (1, 128, 129, 512, 513, 16_384)]

    assert sizes == [16_384, 16_384, 16_256, 4_096, 4_096, 4_096]  # 2 MiB by 129 ranks is 16,256.99


def test_at_least_five_names_are_sent_and_as_much_of_them_as_fits():
    face = "\N{GRINNING FACE}"  # 12 bytes in JSON

    again = StepReport.from_bytes(full_of(face).to_bytes())

    # Five lists and eight texts. Names of 4 * 4 + 20 characters and texts of 4 * 4 + 40 take 16,854 bytes; the next
    # try is with 4 * 2.
    assert again.unused.params == (*[face * 28 + "..."] * 5, "... 3000 in all")
    assert again.failure == Failure(face * 48, face * 48)


def test_names_shrink_with_their_number():
    names = [f"{index:02}" + "\x00" * 300 for index in range(16)]  # 6 bytes for each zero byte in JSON

    # 16 and 8 names of 4 * 16 + 20 and 4 * 8 + 20 characters would fit, but so do 16 of 4 * 32 + 20.
    assert unused_after(names) == tuple(name[:148] + "..." for name in names)
