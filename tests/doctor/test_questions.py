"""What the facts of all ranks come to, also where no machine here has such facts."""

import pytest

from megabucket.doctor.questions import Answer, Question, judge_bits, judge_gradients, judge_versions, merge
from megabucket.doctor.report import Verdict
from megabucket.doctor.run import judge_refusal

YES, NO = Answer(Verdict.HOLDS, "yes", "good"), Answer(Verdict.FINDING, "no", "bad")


def question(*, is_required=True):
    return Question("name", lambda _: YES, merge, "what a refusal means", is_required=is_required)


class TestAnswersOfAllRanks:
    def test_yes_on_all_ranks_holds(self):
        assert merge([YES, YES]) == YES

    def test_a_rank_that_says_no_is_named(self):
        assert merge([YES, NO, YES]) == (Verdict.FINDING, "no on rank 1", "bad", (1,))

    def test_no_on_all_ranks_names_none(self):
        assert merge([NO, NO]) == (Verdict.FINDING, "no", "bad", ())

    def test_the_ranks_at_fault_are_named_instead_of_those_that_say_so(self):
        blame = NO._replace(ranks=(2,))

        assert merge([blame, YES, YES, blame]).ranks == (2,)

    def test_a_note_is_worse_than_yes_and_better_than_a_finding(self):
        note = Answer(Verdict.NOTE, "hm", "harmless")

        assert merge([YES, note]).verdict is Verdict.NOTE
        assert merge([YES, note, NO]).verdict is Verdict.FINDING


class TestRefusals:
    def test_of_all_ranks_are_a_finding_where_the_library_needs_it_and_a_note_elsewhere(self):
        facts = [{"raised": "RuntimeError: no"}] * 2

        needed, spare = judge_refusal(question(), facts), judge_refusal(question(is_required=False), facts)

        assert needed == (Verdict.FINDING, "refused: RuntimeError: no", "what a refusal means", ())
        assert spare == (Verdict.NOTE, "refused: RuntimeError: no", "what a refusal means", ())

    def test_of_some_ranks_are_a_finding_in_any_case(self):
        answer = judge_refusal(question(is_required=False), [YES, {"raised": "RuntimeError: no"}])

        assert answer.verdict is Verdict.FINDING
        assert answer.text == "works on rank 0; RuntimeError: no on rank 1"
        assert answer.ranks == (1,)

    def test_in_other_words_are_none_of_all_ranks(self):
        facts = [{"raised": "RuntimeError: timed out after 60 s on rank 0"}, {"raised": "RuntimeError: no all-to-all"}]
        alike = [{"raised": f"RuntimeError: [127.0.0.1:{port}] no"} for port in (4000, 5000)]

        assert judge_refusal(question(is_required=False), facts).verdict is Verdict.FINDING
        assert judge_refusal(question(is_required=False), alike).verdict is Verdict.NOTE

    def test_of_no_rank_are_no_answer(self):
        assert judge_refusal(question(), [YES, YES]) is None


class TestRanks:
    def fact(self, libraries="megabucket 1.0, torch 2.13", python="3.11.7", host="a", device="H100", apex=""):
        return {"host": host, "device": device, "libraries": libraries, "python": python, "apex": apex}

    def test_different_torch_versions_are_a_finding(self):
        answer = judge_versions([self.fact(), self.fact("megabucket 1.0, torch 2.12"), self.fact()])

        assert (answer.verdict, answer.ranks) == (Verdict.FINDING, (1,))
        assert answer.text == (
            "megabucket 1.0, torch 2.13, Python 3.11 on ranks 0, 2; megabucket 1.0, torch 2.12, Python 3.11 on rank 1"
        )

    @pytest.mark.parametrize(
        ("python", "verdict"), [("3.12.1", Verdict.FINDING), ("3.11.10", Verdict.NOTE)], ids=["other", "patch"]
    )
    def test_another_python_is_a_finding_and_a_patch_of_it_a_note(self, python, verdict):
        """As wrapping sees it."""
        answer = judge_versions([self.fact(), self.fact(python=python)])

        assert (answer.verdict, answer.ranks) == (verdict, (1,))

    def test_hosts_are_counted_and_another_device_is_a_note(self):
        answer = judge_versions([self.fact(), self.fact(), self.fact(host="b", device="A100")])

        assert (answer.verdict, answer.ranks) == (Verdict.NOTE, (2,))
        assert answer.text.startswith("3 ranks on 2 hosts: H100, megabucket 1.0, ")

    def test_what_is_known_of_apex_is_said_and_all_holds_where_it_is_the_same(self):
        nothing, refused = judge_versions([self.fact()] * 2), judge_versions([self.fact(apex="no: another project")] * 2)

        assert nothing[::2] == (Verdict.HOLDS, "the same on every rank")
        assert refused[::2] == (Verdict.HOLDS, "the same on every rank; no: another project")

    def test_ranks_on_which_apex_differs_are_a_note(self):
        answer = judge_versions([self.fact(apex="works"), self.fact(), self.fact(apex="works", device="A100")])

        assert (answer.verdict, answer.ranks) == (Verdict.NOTE, (1,))
        assert answer.meaning == "kernels='apex' would not work on all ranks: works on ranks 0, 2; no amp_C on rank 1"


def test_ranks_with_other_bits_are_named_with_what_differs():
    own = {"1 x float32": "a", "7 x float32": "b"}

    answer = judge_bits([own, own, {**own, "7 x float32": "c"}])

    assert (answer.verdict, answer.text, answer.ranks) == (Verdict.FINDING, "other bits on rank 2: 7 x float32", (2,))


def test_an_update_that_is_wrong_because_gradients_are_is_no_second_problem():
    def fact(text, *ranks, is_in_gradients):
        return {"problem": text, "where": "'w'", "is_in_gradients": is_in_gradients, "ranks": ranks, "rounding": 0.0}

    cause = fact("step 1: rank 1 is missing", 1, is_in_gradients=True)
    update = fact("step 1: parameters are wrong", is_in_gradients=False)

    answer = judge_gradients([cause, update, cause])

    assert (answer.text, answer.ranks) == ("step 1: rank 1 is missing (in 'w')", (1,))
