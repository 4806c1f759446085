"""From reports to the one error: every fault alone, which of several is named, and what the error says."""

import pytest

from megabucket.ddp.report import Problem, RankReport, resolve_error
from megabucket.errors import (
    CallMismatchError,
    DetachedGradError,
    HyperparameterMismatchError,
    LateGradientError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    ParametersChangedError,
    PeerFailedError,
    ReplicasDivergedError,
    ScheduleMismatchError,
    StepMismatchError,
    StorageMovedError,
    TrainabilityChangedError,
    UnusedParameterError,
)


def problem(kind, **fields):
    """The change of a report that has one problem."""
    return {"problems": (Problem(kind.__name__, fields),)}


def failed_in(phase, cause="ValueError: boom"):
    return problem(PeerFailedError, phase=phase, cause=cause)


FAILED = failed_in("forward")
MOVED = problem(StorageMovedError, params=["a", "b"], found="bfloat16 on cpu", expected="float32 on cpu")
LATE = problem(LateGradientError, params=["a", "b"], bucket=2, num_buckets=4, phase="in flight")
UNUSED = problem(UnusedParameterError, params=["c", "d"], bucket=3)
NONFINITE = problem(
    NonFiniteGradientError, param="a", bucket=1, num_buckets=4, finding="nan in 1 of 2 elements, first at [1]", num_others=5
)


def together(*changes):
    """One change out of several."""
    every = {name: value for change in changes for name, value in change.items()}
    return every | {"problems": tuple(one for change in changes for one in change.get("problems", ()))}


def reports_of(*changes):
    """One report per rank, each with its changes."""
    return [RankReport(rank, **change) for rank, change in enumerate(changes)]


def error_of(reports):
    return resolve_error(7, 4, reports)


def said(error):
    """All that an error says: class, text and fields."""
    return error.to_dict() if error is not None else None


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_reports_without_faults_are_no_error(num_ranks):
    report = {"step_number": 5, "num_microbatches": 2, "num_skipped_forwards": 1, "num_updates": 1, "force_all_reduce": True}

    assert error_of(reports_of(*[report] * num_ranks)) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (FAILED, PeerFailedError(step=7, rank=1, phase="forward", cause="ValueError: boom")),
        (
            MOVED,
            StorageMovedError(step=7, rank=1, params=("a", "b"), found="bfloat16 on cpu", expected="float32 on cpu"),
        ),
        (
            problem(TrainabilityChangedError, frozen=["a"], unfrozen=["b"]),
            TrainabilityChangedError(step=7, rank=1, frozen=("a",), unfrozen=("b",)),
        ),
        (
            problem(ParametersChangedError, added=["b"], removed=["a"], replaced=["c"]),
            ParametersChangedError(step=7, rank=1, added=("b",), removed=("a",), replaced=("c",)),
        ),
        (problem(DetachedGradError, params=["c"]), DetachedGradError(step=7, rank=1, params=("c",))),
        (
            LATE,
            LateGradientError(step=7, rank=1, params=("a", "b"), bucket=2, num_buckets=4, phase="in flight"),
        ),
        (
            UNUSED,
            UnusedParameterError(step=7, ranks=(1,), params=("c", "d"), bucket=3, num_buckets=4, num_ranks=3),
        ),
        (
            NONFINITE,
            NonFiniteGradientError(
                step=7,
                rank=1,
                param="a",
                bucket=1,
                num_buckets=4,
                finding="nan in 1 of 2 elements, first at [1]",
                num_others=5,
            ),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_fault_of_one_rank_is_the_error_of_its_class_with_all_that_is_known(change, expected):
    assert said(error_of(reports_of({}, change, {}))) == said(expected)


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        (
            "num_updates",
            (1, 1, 0),
            ReplicasDivergedError(step=7, what="optimizer updates since the last agreement", by_rank=(1, 1, 0)),
        ),
        ("step_number", (5, 5, 6), StepMismatchError(step=7, what="the caller's step numbers", by_rank=(5, 5, 6))),
        (
            "num_dropped_steps",
            (0, 1, 1),
            StepMismatchError(step=7, what="dropped steps (zero_grad() without an optimizer step)", by_rank=(0, 1, 1)),
        ),
        (
            "num_skipped_forwards",
            (0, 2, 0),
            StepMismatchError(step=7, what="training forwards that no backward has reached", by_rank=(0, 2, 0)),
        ),
        ("num_microbatches", (2, 2, 1), MicrobatchMismatchError(step=7, by_rank=(2, 2, 1))),
        (
            "kept",
            (("a", "b"), (), ()),
            StepMismatchError(
                step=7, what="steps begun without clearing the last gradients (zero_grad()) of 'a', 'b'", by_rank=(1, 0, 0)
            ),
        ),
        (
            "kept",
            (("a", "b"), ("a",), ("a",)),
            StepMismatchError(
                step=7, what="steps begun without clearing the last gradients (zero_grad()) of 'b'", by_rank=(1, 0, 0)
            ),
        ),
        (
            "num_loads",
            (0, 3, 3),
            ReplicasDivergedError(
                step=7,
                what="loads of weights (load_state_dict(), by submodule) since the last agreement",
                by_rank=(0, 3, 3),
                usual_cause="load",
            ),
        ),
        (
            "hyperparameters",
            (("momentum of group 0=0.5", "lr of group 0=0.1"), ("momentum of group 0=0.5",), ("lr of group 0=0.2",)),
            ReplicasDivergedError(
                step=7,
                what="hyperparameters of the last update (momentum of group 0)",
                by_rank=("0.5", "0.5", "nothing"),
                usual_cause="hyperparameters",
            ),
        ),
        (
            "fingerprint",
            (5, 5, 6),
            StepMismatchError(step=7, what="kept gradients or hyperparameters (checksums)", by_rank=(5, 5, 6)),
        ),
        (
            "is_committing",
            (True, False, True),
            ScheduleMismatchError(step=7, what="finish_grad_sync() before the optimizer step (0: called)", by_rank=(1, 0, 1)),
        ),
        ("force_all_reduce", (False, False, True), ScheduleMismatchError(step=7, what="force_all_reduce", by_rank=(0, 0, 1))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_differ_are_the_error_of_their_class_with_the_values_of_all_ranks(field, values, expected):
    assert said(error_of(reports_of(*({field: value} for value in values)))) == said(expected)


# Everything at once, strongest first: each is what explains those after it.
IN_ORDER = [
    ("num_updates", 1, ReplicasDivergedError, "optimizer updates since the last agreement (rank 1 failed in forward: Val"),
    ("num_loads", 1, ReplicasDivergedError, "loads of weights (load_state_dict(), by submodule)"),
    ("failure", FAILED, PeerFailedError, "rank 1 failed in forward: ValueError: boom"),
    ("change", MOVED, StorageMovedError, "on rank 1 parameters have left the buffer"),
    ("step_number", 9, StepMismatchError, "the caller's step numbers"),
    ("num_dropped_steps", 9, StepMismatchError, "dropped steps"),
    ("num_skipped_forwards", 9, StepMismatchError, "training forwards that no backward has reached"),
    ("num_microbatches", 9, MicrobatchMismatchError, "microbatch counts differ"),
    ("kept", ("a",), StepMismatchError, "steps begun without clearing the last gradients"),
    ("is_committing", True, ScheduleMismatchError, "finish_grad_sync() before the optimizer step"),
    ("force_all_reduce", True, ScheduleMismatchError, "force_all_reduce"),
    ("late", LATE, LateGradientError, "received a gradient although bucket 2"),
    ("unused", UNUSED, UnusedParameterError, "got no gradient on rank 1"),
    ("nonfinite", NONFINITE, NonFiniteGradientError, "the gradient of 'a' on rank 1"),
    ("fingerprint", 9, StepMismatchError, "kept gradients or hyperparameters (checksums)"),
]


@pytest.mark.parametrize("first", range(len(IN_ORDER)), ids=[field for field, *_ in IN_ORDER])
def test_of_several_faults_the_one_that_explains_the_others_is_named(first):
    faults = together(*(value if isinstance(value, dict) else {field: value} for field, value, *_ in IN_ORDER[first:]))

    error = error_of(reports_of({}, faults, {}))

    _, _, kind, text = IN_ORDER[first]
    assert type(error) is kind
    assert text in str(error)


@pytest.mark.parametrize("end", [{}, {"sent_buckets": True}], ids=["in a step", "beside its buckets"])
def test_updates_that_differ_are_explained_by_the_first_rank_that_failed(end):
    error = error_of(reports_of({"num_updates": 1, **end}, FAILED, failed_in("backward", "other")))

    assert said(error) == said(
        ReplicasDivergedError(
            step=7,
            what="optimizer updates since the last agreement (rank 1 failed in forward: ValueError: boom)",
            by_rank=(1, 0, 0),
        )
    )


@pytest.mark.parametrize(
    "change",
    [FAILED, failed_in("optimizer"), MOVED, LATE, NONFINITE],
    ids=["failure", "optimizer failure", "change", "late", "nonfinite"],
)
def test_of_several_ranks_with_a_fault_the_lowest_is_named(change):
    assert error_of(reports_of({}, change, change)).rank == 1


def test_unused_parameters_are_named_with_the_ranks_that_miss_them():
    error = error_of(reports_of({}, UNUSED, problem(UnusedParameterError, params=["x", "c"], bucket=0)))

    # Rank 1 misses c and d, rank 2 x and c.
    assert said(error) == said(UnusedParameterError(step=7, ranks=(1, 2), params=("c",), bucket=3, num_buckets=4, num_ranks=3))
    assert "'c' got no gradient on ranks 1, 2 of 3 ranks (first in bucket 3 of 4, counted from 0). They require" in str(error)


class CountedName(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    __hash__ = str.__hash__
    num_comparisons = 0

    def __eq__(self, other):
        CountedName.num_comparisons += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize(
    "change_of", [lambda names: problem(UnusedParameterError, params=names, bucket=0), lambda names: {"kept": tuple(names)}]
)
def test_the_names_of_all_ranks_are_compared_in_linear_time(change_of):
    names = [f"experts.{index}" for index in range(50)]
    reports = reports_of(*(change_of(list(map(CountedName, names))) for _ in range(20)), {})
    CountedName.num_comparisons = 0

    error = error_of(reports)

    assert "experts.0" in str(error)
    assert CountedName.num_comparisons <= 4 * 50 * 20  # a search in each list of 50 would take 25 * 50 * 20


COMMITTING = {"is_committing": True, "hyperparameters": ("lr of group 0=0.1",)}


def test_hyperparameters_that_differ_before_an_update_are_an_error_that_has_spoilt_nothing():
    error = error_of(reports_of(COMMITTING, COMMITTING, COMMITTING | {"hyperparameters": ("lr of group 0=0.2",)}))

    assert said(error) == said(HyperparameterMismatchError(step=7, what="lr of group 0", by_rank=("0.1", "0.1", "0.2")))


def test_of_hyperparameters_the_first_that_differs_is_named_whatever_its_name():
    with_equals = [COMMITTING | {"hyperparameters": ("lr=0.1", f"a=b={value}")} for value in (1, 2)]

    error = error_of(reports_of(*with_equals))

    assert said(error) == said(HyperparameterMismatchError(step=7, what="a=b", by_rank=("1", "2")))


@pytest.mark.parametrize("other", ["save_checkpoint()", "wrap: parameters"])
def test_ranks_in_different_calls_or_parts_of_one_are_named(other):
    error = error_of([RankReport(0, other), RankReport(1, "wrap: config")])

    assert said(error) == said(CallMismatchError(step=7, by_rank=(other, "wrap: config")))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (FAILED | {"is_committing": False, "hyperparameters": ()}, PeerFailedError),
        ({"num_dropped_steps": 1, "is_committing": False, "hyperparameters": ()}, StepMismatchError),
        ({"is_committing": False, "hyperparameters": ()}, ScheduleMismatchError),
    ],
    ids=["failure", "dropped", "finished"],
)
def test_a_rank_that_does_not_come_to_update_is_named_for_that(change, kind):
    assert type(error_of(reports_of(COMMITTING, COMMITTING | change, COMMITTING))) is kind


def test_a_rank_that_asked_nobody_has_an_error_of_its_own():
    error = error_of([RankReport(2, num_microbatches=3, **UNUSED)])

    assert said(error) == said(
        UnusedParameterError(step=7, ranks=(2,), params=("c", "d"), bucket=3, num_buckets=4, num_ranks=1)
    )


def test_the_order_of_reports_is_the_order_of_ranks_in_the_text():
    error = error_of(reports_of({"num_microbatches": 2}, {"num_microbatches": 1}, {"num_microbatches": 2}))

    assert "2 on ranks 0, 2; 1 on rank 1" in str(error)
