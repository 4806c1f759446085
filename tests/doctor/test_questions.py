"""What the facts of all ranks come to, also where no machine here has such facts."""

import pytest
import torch
from torch.distributed import HashStore

from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.doctor.collectives import average, collective_questions, same_bits
from megabucket.doctor.gradients import path_is_right, paths
from megabucket.doctor.question import Answer, Bench, Question, conclude, examine, judge_refusal, merge
from megabucket.doctor.ranks import clocks, hosts, store, versions
from megabucket.doctor.report import Verdict

CONFIG = DistributedDataParallelConfig()
BENCH = Bench(LocalCommunicator(), torch.device("cpu"), CONFIG)
YES, NO = Answer(Verdict.HOLDS, "yes", "good"), Answer(Verdict.FINDING, "no", "bad")


def judged(asking, facts):
    """Return the answer of a question when all ranks say ``facts``."""
    next(asking)
    return conclude(asking, facts)


def question(*, is_required=True, ask=lambda _: YES):
    return Question("section", "name", ask, "what a refusal means", is_required=is_required)


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

    def test_a_refusal_by_all_ranks_is_a_finding_where_the_library_needs_it_and_a_note_elsewhere(self):
        facts = [{"raised": "RuntimeError: no"}] * 2

        needed, spare = judge_refusal(question(), facts), judge_refusal(question(is_required=False), facts)

        assert needed == (Verdict.FINDING, "refused: RuntimeError: no", "what a refusal means", ())
        assert spare == (Verdict.NOTE, "refused: RuntimeError: no", "what a refusal means", ())

    def test_a_refusal_by_some_ranks_is_a_finding_in_any_case(self):
        answer = judge_refusal(question(is_required=False), [{"answer": YES}, {"raised": "RuntimeError: no"}])

        assert answer.verdict is Verdict.FINDING
        assert answer.text == "works on rank 0; RuntimeError: no on rank 1"
        assert answer.ranks == (1,)

    def test_a_refusal_in_other_words_is_none_by_all_ranks(self):
        facts = [{"raised": "RuntimeError: timed out after 60 s on rank 0"}, {"raised": "RuntimeError: no all-to-all"}]
        alike = [{"raised": f"RuntimeError: [127.0.0.1:{port}] no"} for port in (4000, 5000)]

        assert judge_refusal(question(is_required=False), facts).verdict is Verdict.FINDING
        assert judge_refusal(question(is_required=False), alike).verdict is Verdict.NOTE

    def test_an_exception_is_an_answer(self):
        def fail(bench):
            raise ValueError("first line\nsecond line")

        line, has_failed = examine(question(ask=fail), BENCH, BENCH.communicator)

        assert (line.verdict, line.answer) == (Verdict.FINDING, "refused: ValueError: first line")
        assert has_failed

    def test_an_interrupt_is_not_swallowed(self):
        def interrupt(bench):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            examine(question(ask=interrupt), BENCH, BENCH.communicator)


class TestRanks:
    def version(self, libraries="megabucket 1.0, torch 2.13", python="3.11.7"):
        return {"libraries": libraries, "python": python}

    def test_different_torch_versions_are_a_finding(self):
        facts = [self.version(), self.version("megabucket 1.0, torch 2.12"), self.version()]

        answer = judged(versions(BENCH), facts)

        assert (answer.verdict, answer.ranks) == (Verdict.FINDING, (1,))
        assert answer.text == (
            "megabucket 1.0, torch 2.13, Python 3.11 on ranks 0, 2; megabucket 1.0, torch 2.12, Python 3.11 on rank 1"
        )

    @pytest.mark.parametrize(
        ("python", "verdict"), [("3.12.1", Verdict.FINDING), ("3.11.10", Verdict.NOTE)], ids=["other", "patch"]
    )
    def test_another_python_is_a_finding_and_a_patch_of_it_a_note(self, python, verdict):
        """As wrapping sees it."""
        answer = judged(versions(BENCH), [self.version(), self.version(python=python)])

        assert (answer.verdict, answer.ranks) == (verdict, (1,))

    def test_hosts_are_counted_and_another_device_is_a_note(self):
        facts = [{"host": "a", "device": "H100"}, {"host": "a", "device": "H100"}, {"host": "b", "device": "A100"}]

        answer = judged(hosts(BENCH), facts)

        assert (answer.verdict, answer.ranks) == (Verdict.NOTE, (2,))
        assert answer.text == "3 ranks on 2 hosts: H100 on ranks 0, 1; A100 on rank 2"

    def test_a_clock_that_is_off_is_a_note(self):
        answer = judged(clocks(BENCH), [{"now_s": 100.0}, {"now_s": 130.0}, {"now_s": 100.01}])

        assert answer[:2] == (Verdict.NOTE, "within 30.00 s")
        assert answer.ranks == (1,)


class LonelyStore(HashStore):
    def clone(self):
        raise NotImplementedError("clone")


class LyingStore(HashStore):
    def get(self, key):
        return b"something else"


class TestStore:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            (LonelyStore, (Verdict.NOTE, "LonelyStore, cannot be cloned")),
            (LyingStore, (Verdict.FINDING, "LyingStore: other ranks' values are wrong")),
        ],
    )
    def test_a_store_that_cannot_be_cloned_is_a_note_and_one_that_lies_a_finding(self, kind, expected, monkeypatch):
        found = kind()
        monkeypatch.setattr("megabucket.doctor.ranks.store_of", lambda _: found)

        assert store(BENCH, None)[:2] == expected


class TestCollectives:
    def test_ranks_with_other_bits_are_named_with_what_differs(self):
        asking = same_bits(BENCH)
        own = next(asking)
        other = {"digests": {**own["digests"], "7 x float32": "c"}}

        answer = conclude(asking, [own, own, other])

        assert (answer.verdict, answer.text, answer.ranks) == (Verdict.FINDING, "rank 2 differs for 7 x float32", (2,))

    def test_an_average_that_differs_between_ranks_is_a_finding(self):
        facts = [{"kind": kind, "answer": YES} for kind in ("sum / n", "rounds like neither", "sum / n")]

        answer = judged(average(BENCH, torch.bfloat16), facts)

        assert (answer.verdict, answer.ranks) == (Verdict.FINDING, (1,))

    def test_16_bit_sums_are_required_when_gradients_have_16_bits(self):
        def required(config):
            return {question.name for question in collective_questions(config) if question.is_required}

        assert "all-reduce SUM, bfloat16" not in required(CONFIG)
        assert "all-reduce SUM, bfloat16" in required(DistributedDataParallelConfig(grad_reduce_in_fp32=False))

    def test_max_is_required_for_the_fence(self):
        def is_required(config):
            return next(question for question in collective_questions(config) if "MAX" in question.name).is_required

        assert is_required(CONFIG)
        assert not is_required(DistributedDataParallelConfig(fence=False))


class TestGradients:
    def test_the_first_path_is_the_configured_one_and_all_paths_have_their_names(self):
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=7)

        found = paths(config)

        assert next(iter(found.items())) == ("as configured", config)
        assert len(found) == 33
        path = found["reduce-scatter, no overlap, one batch, sum"]
        assert path.use_distributed_optimizer
        assert not path.overlap_grad_reduce
        assert path.bucket_groups == "single"
        assert path.grad_reduction == "sum"

    def test_an_update_that_is_wrong_because_gradients_are_is_no_second_problem(self):
        def fact(text, *ranks, is_in_gradients):
            answer = Answer(Verdict.FINDING, text, "bad", ranks)
            return {"answer": answer, "where": "'w'", "is_in_gradients": is_in_gradients, "rounding": 0.0}

        cause = fact("step 1: rank 1 is missing", 1, is_in_gradients=True)
        update = fact("step 1: parameters are wrong", is_in_gradients=False)

        answer = judged(path_is_right(BENCH, CONFIG, is_configured=False), [cause, update, cause])

        assert (answer.text, answer.ranks) == ("step 1: rank 1 is missing (in 'w')", (1,))
