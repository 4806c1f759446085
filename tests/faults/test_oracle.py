"""The oracle of the fault harness: exact, independent of the library, and not fooled by small differences."""

import pytest
import torch

from faults.acts import make_step
from faults.model import FaultModel, loss_of, make_batch
from faults.oracle import Oracle, first_difference

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


def test_one_element_that_is_off_by_one_bit_is_found_and_named():
    right = {"w": torch.tensor([1.0, 2.0, 3.0])}
    wrong = {"w": torch.tensor([1.0, 2.0, torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))])}

    assert first_difference(right, right) == ""
    assert first_difference(wrong, right) == "w[2] is 3, should be 3 (1 of 3 differ)"


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
