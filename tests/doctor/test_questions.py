"""Judging facts: pure, so what no machine here shows can be shown."""

import pytest
import torch

from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.doctor.gradients import gradient_probe, paths
from megabucket.doctor.group_probes import group_probes
from megabucket.doctor.numeric_probes import numeric_probes
from megabucket.doctor.port_probes import port_probes
from megabucket.doctor.probe import Bench, Judgement, Probe, ask, conclude, has_failed, not_tried, right_or
from megabucket.doctor.report import Verdict
from megabucket.doctor.setup_probes import setup_probes

CONFIG = DistributedDataParallelConfig()


def judged(probes, name, facts):
    """Return the line of the question called ``name`` for these facts."""
    return conclude(next(probe for probe in probes if probe.name == name), facts)


def question(*, is_required=True, observe=lambda _: {"is_right": True}):
    judge = right_or("good", wrong="bad")
    return Probe("section", "name", observe, judge, "what a refusal means", is_required=is_required)


class TestOutcomes:
    def test_yes_on_all_ranks_holds(self):
        line = conclude(question(), [{"is_right": True}] * 2)

        assert (line.verdict, line.answer, line.meaning, line.ranks) == (Verdict.HOLDS, "yes", "good", ())

    def test_a_rank_that_says_no_is_named(self):
        line = conclude(question(), [{"is_right": True}, {"is_right": False}, {"is_right": True}])

        assert (line.verdict, line.answer, line.ranks) == (Verdict.FINDING, "wrong result on rank 1", (1,))

    def test_when_all_ranks_see_the_same_those_it_is_about_are_named(self):
        fact = {"is_right": False, "problem": "rank 2 is missing", "culprits": [2]}

        line = conclude(question(), [fact] * 4)

        assert (line.answer, line.ranks) == ("rank 2 is missing", (2,))

    def test_a_refusal_by_all_ranks_is_a_finding_where_the_library_needs_it_and_a_note_elsewhere(self):
        facts = [{"raised": "RuntimeError: no"}] * 2

        needed, spare = conclude(question(), facts), conclude(question(is_required=False), facts)

        assert (needed.verdict, needed.answer) == (Verdict.FINDING, "refused: RuntimeError: no")
        assert (spare.verdict, spare.meaning) == (Verdict.NOTE, "what a refusal means")

    def test_a_refusal_by_some_ranks_is_a_finding_in_any_case(self):
        line = conclude(question(is_required=False), [{"is_right": True}, {"raised": "RuntimeError: no"}])

        assert line.verdict is Verdict.FINDING
        assert line.answer == "works on rank 0; RuntimeError: no on rank 1"
        assert line.ranks == (1,)

    def test_a_refusal_in_other_words_is_none_by_all_ranks(self):
        facts = [{"raised": "RuntimeError: timed out after 60 s on rank 0"}, {"raised": "RuntimeError: no all-to-all"}]
        alike = [{"raised": f"RuntimeError: [127.0.0.1:{port}] no"} for port in (4000, 5000)]

        assert conclude(question(is_required=False), facts).verdict is Verdict.FINDING
        assert conclude(question(is_required=False), alike).verdict is Verdict.NOTE

    def test_an_exception_is_what_the_rank_saw(self):
        def fail(bench):
            raise ValueError("first line\nsecond line")

        fact = ask(question(observe=fail), Bench(LocalCommunicator(), torch.device("cpu"), None))

        assert fact == {"raised": "ValueError: first line"}
        assert has_failed([{}, fact])
        assert not has_failed([{}])

    def test_an_interrupt_is_not_swallowed(self):
        def interrupt(bench):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ask(question(observe=interrupt), Bench(LocalCommunicator(), torch.device("cpu"), None))

    def test_what_is_not_tried_says_why(self):
        line = not_tried(question(), "there is only one rank")

        assert (line.verdict, line.meaning) == (Verdict.NOT_TRIED, "there is only one rank")


class TestRanks:
    def version(self, **fields):
        return {"megabucket": "1.0", "torch": "2.13", "python": "3.11.7", **fields}

    def test_different_torch_versions_are_a_finding(self):
        facts = [self.version(), self.version(torch="2.12"), self.version()]

        line = judged(setup_probes(CONFIG), "versions", facts)

        assert (line.verdict, line.ranks) == (Verdict.FINDING, (1,))
        assert line.answer == (
            "megabucket 1.0, torch 2.13, Python 3.11 on ranks 0, 2; megabucket 1.0, torch 2.12, Python 3.11 on rank 1"
        )

    @pytest.mark.parametrize(
        ("python", "verdict"), [("3.12.1", Verdict.FINDING), ("3.11.10", Verdict.NOTE)], ids=["other", "patch"]
    )
    def test_another_python_is_a_finding_and_a_patch_of_it_a_note(self, python, verdict):
        """As wrapping sees it."""
        line = judged(setup_probes(CONFIG), "versions", [self.version(), self.version(python=python)])

        assert (line.verdict, line.ranks) == (verdict, (1,))

    def test_hosts_are_counted_and_another_device_is_a_note(self):
        facts = [{"host": "a", "device": "H100"}, {"host": "a", "device": "H100"}, {"host": "b", "device": "A100"}]

        line = judged(setup_probes(CONFIG), "hosts", facts)

        assert (line.verdict, line.ranks) == (Verdict.NOTE, (2,))
        assert line.answer == "3 ranks on 2 hosts: H100 on ranks 0, 1; A100 on rank 2"

    def test_a_clock_that_is_off_is_a_note(self):
        line = judged(setup_probes(CONFIG), "clocks", [{"now_s": 100.0}, {"now_s": 130.0}, {"now_s": 100.01}])

        assert (line.verdict, line.answer, line.ranks) == (Verdict.NOTE, "within 30.00 s", (1,))


class TestProcessGroup:
    def test_a_store_that_cannot_be_cloned_is_a_note(self):
        facts = [{"is_right": True, "kind": "HashStore", "can_clone": False}] * 2

        line = judged(group_probes(CONFIG), "store", facts)

        assert (line.verdict, line.answer) == (Verdict.NOTE, "HashStore, cannot be cloned")

    def test_a_store_that_brings_other_values_is_a_finding(self):
        facts = [{"is_right": rank != 1, "kind": "TCPStore", "can_clone": True} for rank in range(2)]

        line = judged(group_probes(CONFIG), "store", facts)

        assert (line.verdict, line.ranks) == (Verdict.FINDING, (1,))

    @pytest.mark.parametrize(
        ("fact", "verdict", "answer"),
        [
            ({"tried": True, "is_right": True, "ended_early": True}, Verdict.HOLDS, "yes, and waited for again"),
            ({"tried": True, "is_right": True, "ended_early": False}, Verdict.NOTE, "a wait ignores its time limit"),
            ({"tried": True, "is_right": False, "ended_early": True}, Verdict.NOTE, "the result is wrong afterwards"),
            ({"tried": False}, Verdict.NOT_TRIED, "not tried"),
        ],
    )
    def test_waits_that_are_given_up(self, fact, verdict, answer):
        line = judged(group_probes(CONFIG), "a wait may be given up", [fact] * 2)

        assert (line.verdict, line.answer) == (verdict, answer)

    @pytest.mark.parametrize(
        ("fact", "verdict", "answer"),
        [
            ({"has": True, "num_entries": 3}, Verdict.HOLDS, "records"),
            ({"has": True, "num_entries": 0}, Verdict.NOTE, "present, records nothing"),
            ({"has": False, "num_entries": 0}, Verdict.NOTE, "not in this build of torch"),
        ],
    )
    def test_the_flight_recorder(self, fact, verdict, answer):
        line = judged(group_probes(CONFIG), "flight recorder", [fact] * 2)

        assert (line.verdict, line.answer) == (verdict, answer)

    def test_how_many_works_a_batch_becomes_is_said(self):
        works = {"all-reduce": 1, "reduce-scatter": 3, "all-gather": 1}

        line = judged(group_probes(CONFIG), "coalescing", [{"is_right": True, "num_works": works}] * 2)

        assert line.answer == "3 calls become 1 all-reduce, 3 reduce-scatter, 1 all-gather"
        assert line.meaning == "a bucket group is several launches"


class TestNumerics:
    def test_ranks_with_other_bits_are_named_with_what_differs(self):
        facts = [{"digests": {"1 x float32": "a", "7 x float32": "b"}} for _ in range(3)]
        facts[2] = {"digests": {"1 x float32": "a", "7 x float32": "c"}}

        line = judged(numeric_probes(CONFIG), "all ranks hold the same bits", facts)

        assert (line.verdict, line.answer, line.ranks) == (Verdict.FINDING, "rank 2 differs for 7 x float32", (2,))

    def test_float32_accumulation_of_bfloat16_holds(self):
        facts = [{"num_lost": 0, "smallest": 258.0, "exact": 258.0}] * 3

        line = judged(numeric_probes(CONFIG), "bfloat16 sums", facts)

        assert (line.verdict, line.answer) == (Verdict.HOLDS, "added in more than bfloat16")

    def test_an_average_that_differs_between_ranks_is_a_finding(self):
        facts = [{"is": kind, "error": 1e-3, "is_close": True} for kind in ("sum / n", "neither", "sum / n")]

        line = judged(port_probes(CONFIG), "all-reduce AVG, bfloat16", facts)

        assert (line.verdict, line.ranks) == (Verdict.FINDING, (1,))


class TestRequirements:
    def test_16_bit_sums_are_required_when_gradients_have_16_bits(self):
        def required(config):
            return {probe.name for probe in port_probes(config) if probe.is_required}

        assert "all-reduce SUM, bfloat16" not in required(CONFIG)
        assert "all-reduce SUM, bfloat16" in required(DistributedDataParallelConfig(grad_reduce_in_fp32=False))

    def test_max_is_required_for_the_fence(self):
        def is_required(config):
            return next(probe for probe in port_probes(config) if "MAX" in probe.name).is_required

        assert is_required(CONFIG)
        assert not is_required(DistributedDataParallelConfig(fence=False))

    def test_the_first_path_is_the_configured_one_and_all_paths_have_their_names(self):
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=7)

        own, *others = paths(config)

        assert own.config == config
        assert own.is_configured
        assert len({path.name for path in others}) == 32
        first = next(path for path in others if path.name == "reduce-scatter, no overlap, one batch, sum")
        assert first.config.use_distributed_optimizer
        assert not first.config.overlap_grad_reduce
        assert first.config.bucket_groups == "single"
        assert first.config.grad_reduction == "sum"

    def test_an_update_that_is_wrong_because_gradients_are_is_no_second_problem(self):
        right = {"is_right": True, "is_in_gradients": False, "owns_gradients": True, "rounding": 0.0}
        cause = {**right, "is_right": False, "is_in_gradients": True, "problem": "step 1: rank 1 is missing", "where": "'w'"}
        cause |= {"culprits": [1], "is_partial": True}
        update = {**right, "is_right": False, "problem": "step 1: parameters are wrong", "where": "'w'"}
        probe = gradient_probe(next(paths(CONFIG)))

        line = conclude(probe, [cause, {**update, "owns_gradients": False}, cause])

        assert (line.answer, line.ranks) == ("step 1: rank 1 is missing (in 'w')", (1,))


def test_a_judgement_without_ranks_concerns_all_or_none():
    assert Judgement(Verdict.HOLDS, "yes", "good").ranks == ()
