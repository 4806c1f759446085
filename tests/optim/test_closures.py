"""``DistributedOptimizer.step(closure)``: loops that hand their last backward to the optimizer, as Lightning's does."""

import pytest
import torch
from optim_ranks import in_ways, run_wrapped

from megabucket import DistributedOptimizer
from megabucket.errors import PeerFailedError

SIZE = 2
MODES = in_ways("all_reduce", "reduce_scatter", "overlap", "explicit")


def run_ranks(program, **switches):
    """Call ``program(rank, ddp, optimizer)`` on each rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 8))

    def optimizer_of(ddp):
        return DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp, clip_grad=0.1)

    def play(rank, ddp, optimizer):
        result = program(rank, ddp, optimizer)
        ddp.finish_param_sync()
        return result, [param.detach().clone() for param in ddp.module.parameters()]

    return run_wrapped(SIZE, model, play, optimizer_of, bucket_size=300, **switches)


def loss_of(ddp, rank, number):
    return ddp(torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean()


def train_by_hand(rank, ddp, optimizer, *, accumulation):
    losses = []
    for step in range(4):
        for microbatch in range(accumulation):
            loss = loss_of(ddp, rank, accumulation * step + microbatch)
            if microbatch < accumulation - 1:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
                if ddp.ddp_config.finish == "explicit":
                    ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_closures(rank, ddp, optimizer, *, accumulation):
    """As Lightning's automatic optimization: forward, ``zero_grad`` before the first backward of a step, backward."""
    losses = []
    for number in range(4 * accumulation):

        def closure(number=number):
            loss = loss_of(ddp, rank, number)
            if number % accumulation == 0:
                optimizer.zero_grad()
            loss.backward()
            if ddp.ddp_config.finish == "explicit" and number % accumulation == accumulation - 1:
                ddp.finish_grad_sync()
            return loss

        if number % accumulation < accumulation - 1:
            with ddp.no_sync():
                closure()
        else:
            losses.append(optimizer.step(closure).item())
            assert optimizer.last_step.updated
    return losses


@MODES
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loop_of_closures_gives_the_weights_of_the_loop_by_hand(switches, accumulation):
    by_hand = run_ranks(lambda *here: train_by_hand(*here, accumulation=accumulation), **switches)
    by_closures = run_ranks(lambda *here: train_by_closures(*here, accumulation=accumulation), **switches)

    for (losses, values), (same_losses, same_values) in zip(by_hand, by_closures, strict=True):
        assert losses == same_losses
        assert all(map(torch.equal, values, same_values))


def test_it_is_called_once_with_gradients_switched_on_and_its_value_is_returned():
    def program(rank, ddp, optimizer):
        calls = []

        def closure():
            calls.append(torch.is_grad_enabled())
            loss_of(ddp, rank, 0).backward()
            return "value"

        with torch.no_grad():
            value = optimizer.step(closure)
        return value, calls, optimizer.last_step.updated

    assert [result for result, _ in run_ranks(program)] == [("value", [True], True)] * SIZE


@MODES
def test_an_exception_in_it_ends_the_step_on_all_ranks_and_the_next_step_is_right(switches):
    def program(rank, ddp, optimizer):
        def closure():
            if rank == 1:
                raise ValueError("boom")
            loss_of(ddp, rank, 0).backward()
            if ddp.ddp_config.finish == "explicit":
                ddp.finish_grad_sync()

        with pytest.raises(PeerFailedError, match=r"rank 1 failed.*boom"), ddp.step():
            optimizer.step(closure)
        optimizer.zero_grad()
        return train_by_closures(rank, ddp, optimizer, accumulation=1)

    for (losses, values), (right_losses, right_values) in zip(
        run_ranks(program, **switches),
        run_ranks(lambda *here: train_by_closures(*here, accumulation=1), **switches),
        strict=True,
    ):
        assert losses == right_losses
        assert all(map(torch.equal, values, right_values))


def test_schedulers_and_skipped_steps_find_what_the_step_has_done():
    def program(rank, ddp, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def closure():
            loss = loss_of(ddp, rank, 0) * (torch.nan if rank == 1 else 1.0)
            loss.backward()
            return loss

        assert optimizer.last_step is None
        optimizer.step(closure)
        optimizer.zero_grad()
        scheduler.step()
        return optimizer.last_step.updated, "nan" in optimizer.last_step.reason

    results = run_ranks(program, nonfinite_gradients="skip_step")
    assert [result for result, _ in results] == [(False, True)] * SIZE
