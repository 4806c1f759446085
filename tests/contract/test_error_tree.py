"""The classes of ``megabucket.errors``: what the docstring promises about them."""

import pickle
import re

import pytest

from megabucket import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith(errors.__name__)
}

# One example of each class; a class without one fails the first test.
EXAMPLES = [
    errors.MegabucketError("text"),
    errors.ConfigError("text", problems=["first", "second"]),
    errors.LayoutError("text"),
    errors.UnsupportedParameterError(param="w", reason="it is odd", remedy="Do not."),
    errors.NoTrainableParametersError(module="Model", frozen=["a", "b"]),
    errors.AlreadyWrappedError(params=["a"]),
    errors.ForeignWrapperError(owner="library.Wrapper", where="around this module", params=["a"], remedy="Do not."),
    errors.OptimizerParametersError(problem="something", params=["a"], remedy="Do not."),
    errors.ProcessGroupMissingError(world_size=2),
    errors.RanksDisagreeError("text"),
    errors.LayoutMismatchError(differences=["entry 3: rank 0 has a, rank 1 has b"], num_different=4, num_entries=9),
    errors.CallMismatchError(step=3, by_rank=["save()", "step()"]),
    errors.StepMismatchError(step=3, what="dropped steps", by_rank=[0, 1]),
    errors.MicrobatchMismatchError(step=3, by_rank=[2, 2, 1]),
    errors.ScheduleMismatchError(step=3, what="force_all_reduce", by_rank=[0, 1]),
    errors.HyperparameterMismatchError(step=3, what="lr of group 0", by_rank=["0.1", "0.2"]),
    errors.ReplicasDivergedError(step=3, what="optimizer updates", by_rank=[1, 0]),
    errors.PhaseError("text"),
    errors.LateGradientError(step=3, rank=1, params=["w"], bucket=1, num_buckets=2, phase="in flight"),
    errors.DelayedGradientError(step=3, rank=1, params=["w"], finding="has come 1 times in 2 backwards"),
    errors.ConcurrentBackwardError(rank=1, thread="second", other_thread="first"),
    errors.UnreducedGradientsError(rank=1),
    errors.UnusedParameterError(step=3, ranks=[1], params=["a"], bucket=0, num_buckets=2, num_ranks=3),
    errors.NonFiniteGradientError(step=3, rank=1, param="a", bucket=0, num_buckets=2, finding="nan in 1 of 2", num_others=1),
    errors.ModelChangedError("text"),
    errors.StorageMovedError(step=3, rank=1, params=["a"], found="bfloat16 on cpu", expected="float32 on cpu"),
    errors.TrainabilityChangedError(step=3, rank=1, frozen=["a"], unfrozen=["b"]),
    errors.ParametersChangedError(step=3, rank=1, added=["a"], removed=["b"], replaced=["c"]),
    errors.DetachedGradError(step=3, rank=1, params=["a"]),
    errors.PeerFailedError(step=3, rank=1, phase="forward", cause="ValueError: boom"),
    errors.PeerLostError(ranks=[1], states=["was last seen 31.5 s ago in forward"], during="waiting for bucket 0"),
    errors.WrapperBrokenError(step=3, rank=1, phase="update", cause="KeyboardInterrupt"),
    errors.UpdateFailedError(kind="Muon", rank=1, params=["a"], cause=ValueError("boom")),
    errors.ForkedProcessError(rank=1, operation="backward"),
    errors.GroupDestroyedError(rank=1, operation="backward"),
    errors.PlainOptimizerError(optimizer="AdamW", params=["a"], rank=1),
    errors.CollectiveError("text"),
    errors.CheckpointError("text"),
    errors.CheckpointNotSavedError(
        step=120, ranks=[3, 5], path="run/file", reason="[Errno 28] No space left on device", last_good_step=100
    ),
    errors.CheckpointInvalidError(path="run/step-00000120", file="manifest.json", problem="it is empty", steps=[80, 100]),
    errors.CheckpointMissingError(root="run", wanted="step 120", steps=[80, 100]),
    errors.CheckpointMismatchError(path="run/step-00000120", problems=["a is missing", "b is unknown"]),
    errors.CheckpointUnavailableError(optimizer="AdamW", method="state_dict()", rank=0, num_shards=2),
    errors.InvariantError("text"),
]


def test_every_class_has_an_example_here():
    assert sorted(type(error).__name__ for error in EXAMPLES) == sorted(CLASSES)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_crosses_process_boundaries_with_its_text_and_fields(error, protocol):
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_is_plain_data_too(error):
    data = error.to_dict()

    assert data.pop("error") == type(error).__name__
    assert data.pop("message") == str(error)
    assert data == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_fields_are_values_that_nobody_can_change_behind_the_text(error):
    assert all(isinstance(value, str | int | float | tuple) for value in vars(error).values())


def documented_tree():
    """Class -> (parent, builtin base or None), read from the tree in the module's docstring."""
    tree, parents = {}, {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"(?P<lead>[ │├└─]*)(?P<name>[A-Z]\w+Error)(?: \((?P<builtin>\w+)\))?(?:\s|$)", line)
        if match is None:
            continue
        depth = len(match["lead"]) // 4
        parents[depth] = match["name"]
        tree[match["name"]] = (parents.get(depth - 1), match["builtin"])
    return tree


def test_the_tree_in_the_docstring_lists_exactly_the_classes_that_exist():
    assert sorted(documented_tree()) == sorted(CLASSES)


@pytest.mark.parametrize(("name", "bases"), documented_tree().items())
def test_the_tree_in_the_docstring_names_the_right_bases(name, bases):
    parent, builtin = bases
    first, *others = [base.__name__ for base in CLASSES[name].__bases__]

    if name == "MegabucketError":
        assert (first, others) == ("Exception", [])
    else:
        assert first == parent
        assert others == ([] if builtin is None else [builtin])


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_means(name):
    assert CLASSES[name].__doc__
