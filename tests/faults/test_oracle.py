"""The oracle of the fault harness: exact, independent of the library, and not fooled by small differences."""

import pytest
import torch

from faults.acts import Act, Do, Edit, before, changed, make_step
from faults.model import FaultModel, loss_of, make_batch
from faults.oracle import Oracle, edited, first_difference

SEED = 3


def concatenated_grads(model, *, num_ranks, batch):
    """The gradients of one process that sees the batches of all ranks at once, in double precision."""
    reference = FaultModel().double()
    reference.load_state_dict(model.state_dict())
    batches = [make_batch(seed=SEED, batch=batch, rank=rank, microbatch=0) for rank in range(num_ranks)]
    inputs, targets = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    (loss_of(reference(inputs), targets) / num_ranks).backward()
    return {name: param.grad for name, param in reference.named_parameters()}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_mean_over_ranks_is_exactly_the_gradient_of_the_concatenated_batch_after_many_steps(num_ranks):
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=num_ranks)

    for batch in range(60):
        means = oracle.compute([make_step(batch)] * num_ranks)

        assert first_difference(means, concatenated_grads(oracle.model, num_ranks=num_ranks, batch=batch)) == ""
        oracle.update()


def test_weights_stay_exact_with_momentum_for_the_steps_of_a_cell():
    single, double = (
        Oracle(FaultModel().to(dtype), seed=SEED, num_ranks=3, momentum=1.0) for dtype in (torch.float32, torch.float64)
    )

    for batch in range(8):
        single.compute([make_step(batch)] * 3)
        single.update()
        means = concatenated_grads(double.model, num_ranks=3, batch=batch)
        for name, param in double.model.named_parameters():
            param.grad = means[name]
        double.update()

    assert first_difference(single.weights(), double.weights()) == ""


def test_every_parameter_has_a_gradient_that_depends_on_rank_batch_and_weights():
    grads = []
    for rank, batch, moves in ((0, 0, False), (1, 0, False), (0, 1, False), (0, 0, True)):
        model = FaultModel()
        if moves:
            model.load_state_dict({name: -value for name, value in model.state_dict().items()})
        inputs, targets = make_batch(seed=SEED, batch=batch, rank=rank, microbatch=0)
        loss_of(model(inputs), targets).backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})

    for name in grads[0]:
        assert all(bool(grad[name].any()) for grad in grads)
        assert all(not torch.equal(grads[0][name], other[name]) for other in grads[1:])


def test_microbatches_and_repeated_backwards_add_up():
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=1)

    once = oracle.compute([make_step(0)])["layers.0.weight"].clone()
    twice = oracle.compute([before(make_step(0), Do.BACKWARD, Act(Do.BACKWARD))])["layers.0.weight"].clone()
    two = oracle.compute([make_step(0, num_microbatches=2)])["layers.0.weight"].clone()

    assert torch.equal(twice, 2 * once)
    assert not torch.equal(two, twice)


@pytest.mark.parametrize(("zeros", "expected"), [(True, torch.zeros(4)), (False, None)])
def test_a_layer_that_no_rank_uses_has_no_gradient_or_zeros(zeros, expected):
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=2, zeros_for_unused=zeros)

    mean = oracle.compute([make_step(0, layers=(0, 2, 3))] * 2)["layers.1.bias"]

    assert mean is None if expected is None else torch.equal(mean, expected)


def test_a_layer_that_one_rank_does_not_use_counts_as_zero_there():
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=2)
    healthy = make_step(0)

    both = oracle.compute([healthy, healthy])["layers.3.bias"].clone()
    one = oracle.compute([healthy, make_step(0, layers=(0, 1, 2))])["layers.3.bias"].clone()
    other = oracle.compute([make_step(0, layers=(0, 1, 2)), healthy])["layers.3.bias"].clone()

    assert torch.equal(one + other, both)


@pytest.mark.parametrize("what", ["nan", "inf", "huge"])
def test_an_edit_reaches_the_mean(what):
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=2)
    healthy = oracle.compute([make_step(0)] * 2)["layers.1.weight"].clone()

    spoilt = changed(make_step(0), Do.BACKWARD, edits=(Edit("layers.1.weight", what),))
    after = oracle.compute([spoilt, make_step(0)])["layers.1.weight"]

    assert not torch.equal(after, healthy)
    assert bool(after.isfinite().all()) == (what == "huge")


def test_a_huge_gradient_is_finite_but_its_square_is_not():
    grad = edited(torch.ones(3), Edit("w", "huge"))

    assert bool(grad.isfinite().all())
    assert not bool(grad.square().isfinite().any())


def test_one_element_that_is_off_by_one_bit_is_found_and_named():
    right = {"w": torch.tensor([1.0, 2.0, 3.0])}
    wrong = {"w": torch.tensor([1.0, 2.0, torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))])}

    assert first_difference(right, right) == ""
    assert first_difference(wrong, right) == "w[2] is 3, should be 3 (1 of 3 differ)"


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        ({"w": None}, {"w": torch.zeros(1)}, "w: is absent, but should be there"),
        ({"w": torch.zeros(1)}, {"w": None}, "w: is there, but should be absent"),
        ({}, {"w": torch.zeros(1)}, "w: is absent, but should be there"),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(1)}, "w: shape (2,) for (1,)"),
        ({"w": torch.tensor([float("nan")])}, {"w": torch.tensor([1.0])}, "w[0] is nan, should be 1 (1 of 1 differ)"),
        ({"w": torch.tensor([1.0])}, {"w": torch.tensor([float("nan")])}, "w[0] is 1, should be nan (1 of 1 differ)"),
    ],
)
def test_differences_are_said_in_words(actual, expected, text):
    assert first_difference(actual, expected) == text


def test_equal_nans_and_infinities_are_no_difference():
    values = {"w": torch.tensor([float("nan"), float("inf"), float("-inf")])}

    assert first_difference(values, {"w": values["w"].clone()}) == ""


def test_going_on_from_a_checkpoint_forgets_momentum():
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=2, momentum=1.0)
    start = oracle.snapshot()
    oracle.compute([make_step(0)] * 2)
    oracle.update()
    first = oracle.snapshot()

    oracle.restart_from(start)
    oracle.compute([make_step(0)] * 2)
    oracle.update()

    assert first_difference(oracle.weights(), first) == ""


def test_following_a_model_that_was_frozen_keeps_the_momentum_of_the_others():
    oracle, twin = (Oracle(FaultModel(), seed=SEED, num_ranks=1, momentum=1.0) for _ in range(2))
    for one in (oracle, twin):
        one.compute([make_step(0)])
        one.update()
    changed = FaultModel()
    changed.load_state_dict(oracle.weights())
    changed.get_parameter("layers.0.weight").requires_grad_(False)

    oracle.follow(changed)
    for one in (oracle, twin):
        one.compute([make_step(1)])
        one.update()

    differing = {name for name in twin.weights() if not torch.equal(oracle.weights()[name], twin.weights()[name])}
    assert differing == {"layers.0.weight"}


def test_a_model_with_its_layers_registered_in_another_order_has_the_same_values_under_the_same_names():
    usual, other = FaultModel(), FaultModel(registration=(0, 2, 1, 3))

    assert first_difference(dict(other.named_parameters()), dict(usual.named_parameters())) == ""
    assert [name for name, _ in other.named_parameters()] != [name for name, _ in usual.named_parameters()]


def test_what_is_cleared_before_the_update_does_not_count_and_what_comes_after_it_neither():
    oracle = Oracle(FaultModel(), seed=SEED, num_ranks=1)
    once = oracle.compute([make_step(0)])["layers.0.weight"].clone()

    extra = (Act(Do.FORWARD, slot=9, microbatch=7), Act(Do.BACKWARD, slot=9))
    cleared = oracle.compute([(*extra, Act(Do.ZERO), *make_step(0))])["layers.0.weight"].clone()
    late = oracle.compute([(*make_step(0), *extra)])["layers.0.weight"].clone()

    assert torch.equal(cleared, once)
    assert torch.equal(late, once)
