"""``with ddp.step():`` -- exceptions that are caught inside, that come when the step is over, and that end an iteration."""

from contextlib import suppress

import pytest
import torch
from loop_ranks import FailsInBackward, Ranks, optimizer_of

from megabucket.errors import MegabucketError, PeerFailedError, PhaseError, ReplicasDivergedError

DROPPED = "The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
CAUGHT = "(caught inside the `with ddp.step():` block, which cannot go on)"
SIZE = 3
FAULTY = 1


class Model(torch.nn.Module):
    """The gradient of each of 100 elements is ``x``. ``fault``: where it raises; in backward when that of ``b`` has come."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(100))
        self.b = torch.nn.Parameter(torch.zeros(100))

    def forward(self, x, fault=None):
        if fault == "forward":
            raise ValueError("boom")
        a = self.a * x
        return (FailsInBackward.apply(a) if fault == "backward" else a).sum() + (self.b * x).sum()


def weights(ddp):
    ddp.finish_param_sync()
    return [ddp.module.a[0].item(), ddp.module.b[0].item()]


def train(ddp, optimizer, rank):
    ddp(rank + 1.0).backward()
    optimizer.step()
    optimizer.zero_grad()


def seen(call):
    """The error that a call raises, as class and text; None without one."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None


def retries(ddp, optimizer, fault):
    """Run a microbatch again whose exception was caught, as many do when memory was short."""
    with ddp.no_sync():
        try:
            ddp(1.0, fault).backward()
        except ValueError:
            ddp(1.0).backward()
    ddp(1.0).backward()
    optimizer.step()


def leaves_out(ddp, optimizer, fault):
    with ddp.no_sync(), suppress(ValueError):
        ddp(1.0, fault).backward()
    ddp(1.0).backward()
    optimizer.step()


def differentiates_another_output(ddp, optimizer, fault):
    if fault == "forward":
        return retries(ddp, optimizer, fault)
    first, second = ddp(1.0, fault), ddp(1.0)
    with suppress(ValueError):
        first.backward()
    second.backward()
    return optimizer.step()


def steps_on_what_came(ddp, optimizer, fault):
    try:
        ddp(1.0, fault).backward()
    except ValueError:
        optimizer.step()


def clears(ddp, optimizer, fault):
    try:
        ddp(1.0, fault).backward()
    except ValueError:
        ddp.zero_grad()
    ddp(1.0).backward()
    optimizer.step()


def finishes(ddp, _, fault):
    try:
        ddp(1.0, fault).backward()
    except ValueError:
        ddp.finish_grad_sync()


def leaves_the_block(ddp, _, fault):
    with suppress(ValueError):
        ddp(1.0, fault).backward()


class TestAnExceptionThatIsCaughtInside:
    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("fault", ["forward", "backward"])
    @pytest.mark.parametrize(
        "goes_on",
        [retries, leaves_out, differentiates_another_output, steps_on_what_came, clears, finishes, leaves_the_block],
    )
    def test_ends_the_step_on_all_ranks_and_the_next_one_is_right(self, goes_on, fault, sharded):
        ranks = Ranks(SIZE, Model(), use_distributed_optimizer=sharded, bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def faulty():
                with ddp.step():
                    if rank == FAULTY:
                        goes_on(ddp, optimizer, fault)
                    else:
                        train(ddp, optimizer, rank)

            found = seen(faulty)
            with ddp.step():
                train(ddp, optimizer, rank)
            return found, weights(ddp)

        cause = "ValueError: boom" if fault == "forward" else "an exception"
        error = (PeerFailedError, f"step 0: rank 1 failed in {fault}: {cause} {CAUGHT}. {DROPPED}")
        # The mean of 1, 2, 3 is 2, in the one step that counts.
        assert ranks.run(run) == [(error, [-2.0, -2.0])] * SIZE

    def test_is_told_as_a_whole_when_another_one_leaves_the_block(self):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def faulty():
                with ddp.step():
                    try:
                        ddp(1.0, "backward" if rank == FAULTY else None).backward()
                    except ValueError as error:
                        raise OSError("no retry") from error
                    optimizer.step()

            return seen(faulty)

        assert ranks.run(run) == [(PeerFailedError, f"step 0: rank 1 failed in backward: OSError: no retry. {DROPPED}")] * 2

    def test_of_the_inner_of_two_blocks_is_raised_once(self):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            def faulty():
                with ddp.step(), ddp.step():
                    ddp(1.0, "backward" if rank == FAULTY else None).backward()

            return seen(faulty), ddp.sync.step

        assert ranks.run(run) == [((PeerFailedError, f"step 0: rank 1 failed in backward: ValueError: boom. {DROPPED}"), 1)] * 2


class TestAnExceptionWhenTheStepIsOver:
    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("clears", [False, True])
    @pytest.mark.parametrize("in_step", [0, 2], ids=["first", "last"])
    def test_stays_on_its_rank_and_the_ranks_stay_in_step(self, in_step, clears, sharded):
        ranks = Ranks(SIZE, Model(), use_distributed_optimizer=sharded, bucket_size=1)

        def run(rank, ddp):
            optimizer, found = optimizer_of(ddp), []
            for step in range(3):
                ddp.step_number = step

                def one(step=step):
                    with ddp.step():
                        ddp(rank + 1.0).backward()
                        optimizer.step()
                        if clears:
                            optimizer.zero_grad()
                        if rank == FAULTY and step == in_step:
                            raise OSError("disk full")

                found.append(seen(one))
                optimizer.zero_grad()
            return found, weights(ddp), ddp.sync.step

        results = ranks.run(run)

        for rank, (found, at_end, num_steps) in enumerate(results):
            expected = [None] * 3
            if rank == FAULTY:
                expected[in_step] = (OSError, "disk full")
            assert (found, at_end, num_steps) == (expected, [-6.0, -6.0], 3)  # three times the mean of 1, 2, 3
        assert len({len(ranks.schedule(rank)) for rank in range(SIZE)}) == 1

    def test_but_before_a_plain_optimizer_has_updated_is_the_cause_of_the_divergence_that_follows(self):
        ranks = Ranks(SIZE, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer, found = optimizer_of(ddp), []
            for step in range(3):

                def one(step=step):
                    with ddp.step():
                        ddp(rank + 1.0).backward()
                        if rank == FAULTY and step == 0:
                            raise OSError("disk full")
                        optimizer.step()

                found.append(seen(one))
                optimizer.zero_grad()
            return found, ddp.sync.step

        for rank, (found, num_steps) in enumerate(ranks.run(run)):
            first, second, third = found
            assert first == ((OSError, "disk full") if rank == FAULTY else None)
            assert second[0] is ReplicasDivergedError
            assert second[1].startswith(
                "step 1: optimizer updates since the last agreement (rank 1 made none because of OSError: disk full) differ "
                "between ranks: 1 on ranks 0, 2; 0 on rank 1."
            )
            assert third is None
            assert num_steps == 3

    def test_and_before_any_rank_has_updated_is_no_fault_of_the_next_step(self):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def fails():
                with ddp.step():
                    ddp(rank + 1.0).backward()
                    raise OSError("disk full")

            found = seen(fails)
            optimizer.zero_grad()
            with ddp.step():
                train(ddp, optimizer, rank)
            return found, weights(ddp)

        assert ranks.run(run) == [((OSError, "disk full"), [-1.5, -1.5])] * 2

    def test_belongs_to_the_next_step_once_that_has_begun(self):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)

            def two_steps():
                with ddp.step():
                    train(ddp, optimizer, rank)
                    loss = ddp(1.0)
                    if rank == FAULTY:
                        raise OSError("disk full")
                    loss.backward()

            return seen(two_steps)

        assert ranks.run(run) == [(PeerFailedError, f"step 1: rank 1 failed in forward: OSError: disk full. {DROPPED}")] * 2


class TestTheEndOfTheData:
    @pytest.mark.parametrize("failing", [{FAULTY}, {0, 1}], ids=["one rank", "all ranks"])
    def test_on_a_rank_is_the_same_error_on_all(self, failing):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            batches = iter([] if rank in failing else [1.0])

            def one():
                with ddp.step():
                    ddp(next(batches)).backward()

            return seen(one)

        text = f"step 0: rank {min(failing)} failed in setup: StopIteration: . {DROPPED}"
        assert ranks.run(run) == [(PeerFailedError, text)] * 2

    def test_in_a_step_that_was_agreed_on_stays_a_stop_iteration(self):
        (ddp,) = Ranks(1, Model()).ddps

        def run():
            with ddp.step():
                ddp(1.0).backward()
                next(iter([]))

        assert seen(run) == (StopIteration, "")


class TestAbortStep:
    def test_is_refused_when_the_others_may_have_updated(self):
        ranks = Ranks(SIZE, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(rank + 1.0).backward()
            if rank == FAULTY:
                with pytest.raises(PhaseError, match=r"abort_step\(\) comes too late: all ranks have agreed on the gradients"):
                    ddp.abort_step("bad batch")
            optimizer.step()  # as the text says
            optimizer.zero_grad()
            train(ddp, optimizer, rank)
            return weights(ddp)

        assert ranks.run(run) == [[-4.0, -4.0]] * SIZE

    def test_that_was_refused_is_the_cause_of_the_divergence_if_the_rank_does_not_update(self):
        ranks = Ranks(2, Model(), bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(1.0).backward()
            if rank == FAULTY:
                with pytest.raises(PhaseError, match="too late"):
                    ddp.abort_step("bad batch")
            else:
                optimizer.step()
            optimizer.zero_grad()
            return seen(lambda: train(ddp, optimizer, rank))[1]

        first, second = ranks.run(run)

        assert first == second
        assert "agreement (rank 1 made none because of abort_step(): bad batch) differ between ranks: 1 on rank 0; 0" in first

    def test_inside_a_block_is_refused_and_raised(self):
        (ddp,) = Ranks(1, Model()).ddps

        def run():
            with ddp.step():
                ddp(1.0).backward()
                ddp.abort_step("bad batch")

        assert seen(run)[0] is PhaseError

    @pytest.mark.parametrize("how", ["updated", "cleared", "numbered", "in a block", "forward"])
    def test_means_the_next_step_once_that_has_begun(self, how):
        ranks = Ranks(2, Model(), bucket_size=1)

        def next_step(rank, ddp, optimizer):
            if how == "cleared":
                ddp.zero_grad()
            elif how == "numbered":
                ddp.step_number = 7
            elif how == "forward":
                loss = ddp(1.0)
            if rank == FAULTY:
                return ddp.abort_step("bad batch")
            return (loss if how == "forward" else ddp(1.0)).backward()

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(rank + 1.0).backward()
            if how == "updated":
                optimizer.step()
            try:
                if how == "in a block":
                    with ddp.step():
                        next_step(rank, ddp, optimizer)
                else:
                    next_step(rank, ddp, optimizer)
            except MegabucketError:
                pass
            return str(ddp.last_error)

        assert ranks.run(run) == [f"step 1: rank 1 failed in abort_step(): bad batch. {DROPPED}"] * 2

    def test_after_finish_grad_sync_is_heard_where_shards_are_gathered(self):
        ranks = Ranks(2, Model(), use_distributed_optimizer=True, finish="explicit", bucket_size=1)

        def run(rank, ddp):
            optimizer = optimizer_of(ddp)
            ddp(1.0).backward()
            ddp.finish_grad_sync()
            if rank == FAULTY:
                ddp.abort_step("bad batch")
            else:
                seen(optimizer.step)
            return str(ddp.last_error)

        assert ranks.run(run) == [f"step 0: rank 1 failed in abort_step(): bad batch. {DROPPED}"] * 2

    def test_does_not_wait(self):
        """The gradients of the only rank that plays never meet others, so a wait would be a deadlock."""
        ranks = Ranks(2, Model(), bucket_size=1)

        ranks.ddps[0].abort_step("bad batch")

        assert ranks.schedule(0) == ["bucket 0", "bucket 1", "fence", "step report"]
