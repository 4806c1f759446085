"""What the facts of all ranks come to, also where no machine here has such facts."""

import pytest

from megabucket.doctor.report import Fact, Question, Status, line_of
from megabucket.doctor.run import _ask

YES, NO, NOTE = Fact("yes"), Fact("no", Status.FINDING), Fact("hm", Status.NOTE)


def question(ask=None, *, is_required=True):
    return Question("name", ask, "meaning", is_required)


def answer(*facts):
    """Return status, text and ranks of the answer to facts by rank."""
    line = line_of(question(), facts)
    return line.status, line.answer, line.ranks


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([YES, YES], (Status.HOLDS, "yes", ())),
        ([YES, NO, YES], (Status.FINDING, "yes on ranks 0, 2; no on rank 1", (1,))),
        ([NO, NO], (Status.FINDING, "no", ())),
        ([YES, NOTE], (Status.NOTE, "yes on rank 0; hm on rank 1", (1,))),
        ([YES, NOTE, NO], (Status.FINDING, "yes on rank 0; hm on rank 1; no on rank 2", (2,))),
        ([Fact("no", Status.FINDING, ranks=(1,)), YES], (Status.FINDING, "no on rank 0; yes on rank 1", (1,))),  # at fault
        ([Fact("a", same="x"), Fact("b", same="x")], (Status.HOLDS, "a on rank 0; b on rank 1", ())),
        (
            [Fact("a", same="x"), Fact("b", same="y"), Fact("a", same="x")],
            (Status.FINDING, "a on ranks 0, 2; b on rank 1", (1,)),
        ),
        (
            [Fact("a", alike="x"), Fact("b", alike="y"), Fact("a", alike="x")],
            (Status.NOTE, "a on ranks 0, 2; b on rank 1", (1,)),
        ),
    ],
)
def test_one_answer_for_all_ranks(facts, expected):
    assert answer(*facts) == expected


def refused(text, *, is_required):
    def ask(_):
        raise RuntimeError(text)

    return _ask(question(ask, is_required=is_required), None)


@pytest.mark.parametrize(("is_required", "status"), [(True, Status.FINDING), (False, Status.NOTE)])
def test_a_refusal_on_all_ranks_is_a_finding_if_the_library_needs_the_operation(is_required, status):
    facts = [refused("no", is_required=is_required)] * 2

    assert answer(*facts) == (status, "refused: RuntimeError: no", ())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_refusal_on_some_ranks_is_a_finding_in_any_case(failing):
    facts = [YES, YES]
    facts[failing] = refused("no", is_required=False)

    status, text, ranks = answer(*facts)

    assert (status, ranks) == (Status.FINDING, (failing,))
    assert f"refused: RuntimeError: no on rank {failing}" in text


def test_refusals_are_equal_if_only_their_numbers_differ():
    texts = ["timed out", "no", "[127.0.0.1:4000] no", "[127.0.0.1:5000] no"]
    timeout, no, *ports = (refused(text, is_required=False) for text in texts)

    assert answer(timeout, no)[0] is Status.FINDING
    assert answer(*ports)[0] is Status.NOTE
