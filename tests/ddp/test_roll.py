"""Small parameters whose gradients are known to come together have ``list.append`` for a hook, and lose nothing by it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_ranks import Ranks, Weights, main_grads
from torch.utils.checkpoint import checkpoint

from megabucket.buffer import GradPhase
from megabucket.errors import PeerFailedError, PhaseError, StorageMovedError, UnreducedGradientsError

BOTH_MODES = pytest.mark.parametrize("sharded", [False, True])


def step(ddp, **factors):
    ddp(**factors).backward()
    ddp.finish_grad_sync()
    shown = main_grads(ddp.module)
    ddp.zero_grad()
    return shown


def learned(ddp, names="abcd"):
    """Run a step from which the hooks are learned, and the groups what to expect."""
    step(ddp, **dict.fromkeys(names, 1.0))


def on_roll(ddp):
    """The parameters whose hook is ``list.append``, in the order of their groups."""
    rolls = {id(group.intake.roll) for group in ddp.bucket_groups}
    slots = [slot for group in ddp.bucket_groups for slot in group.slots]
    hooks = [(slot.name, *slot.param._post_accumulate_grad_hooks.values()) for slot in slots]
    return "".join(name for name, *of_param in hooks if any(id(getattr(hook, "__self__", None)) in rolls for hook in of_param))


@BOTH_MODES
def test_after_one_backward_only_the_last_of_those_that_come_together_has_a_hook_in_python(sharded):
    (ddp,) = Ranks(1, Weights(), use_distributed_optimizer=sharded).ddps
    assert on_roll(ddp) == ""

    learned(ddp)  # gradients come as d, c, b, a

    assert on_roll(ddp) == "dcb"
    assert step(ddp, a=2.0, b=3.0, c=4.0, d=5.0) == {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0}
    assert on_roll(ddp) == "dcb"


backwards = st.lists(st.tuples(st.permutations("abcdef"), st.integers(1, 6), st.booleans()), min_size=2, max_size=5)


@given(backwards, st.sampled_from([1, 250, 10_000]), st.booleans())
def test_whatever_comes_in_whatever_order_each_gradient_is_there_once(backwards, bucket_size, sharded):
    config = {"bucket_size": bucket_size, "use_distributed_optimizer": sharded, "unused_parameters": "zero"}
    (ddp,) = Ranks(1, Weights("abcdef"), **config).ddps
    learned(ddp, "abcdef")
    expected = dict.fromkeys("abcdef", 0.0)
    for order, count, accumulates in backwards:
        factors = {name: float(index) for index, name in enumerate(order[:count], start=1)}
        expected = {name: value + factors.get(name, 0.0) for name, value in expected.items()}
        if accumulates:
            with ddp.no_sync():
                ddp(**factors).backward()
        else:
            assert step(ddp, **factors) == expected
            expected = dict.fromkeys("abcdef", 0.0)
        assert not any(group.intake.roll for group in ddp.bucket_groups)


def test_what_was_learned_is_forgotten_after_another_order_and_learned_again_later():
    (ddp,) = Ranks(1, Weights()).ddps
    learned(ddp)

    step(ddp, d=4.0, c=3.0, b=2.0, a=1.0)  # the one that calls the roll comes first
    assert on_roll(ddp) == ""
    step(ddp, a=1.0, b=1.0, c=1.0, d=1.0)
    assert on_roll(ddp) == ""
    step(ddp, a=1.0, b=1.0, c=1.0, d=1.0)
    assert on_roll(ddp) == "dcb"


def test_a_group_is_sent_when_its_roll_is_called():
    ranks = Ranks(1, Weights(), bucket_size=200)  # d and c, b and a
    (ddp,) = ranks.ddps
    learned(ddp)
    learned(ddp)
    sent = []
    middle = ddp.module.a * 1.0
    middle.register_hook(lambda _: sent.append([group.grad_phase is GradPhase.IN_FLIGHT for group in ddp.bucket_groups]))

    (middle.sum() + ddp(b=1.0, c=1.0, d=1.0)).backward()

    assert on_roll(ddp) == "db"
    assert sent == [[True, False]]


@BOTH_MODES
def test_a_backward_that_nobody_announces_is_found_by_what_comes_next(sharded):
    """It does not come to an output of the module, nor to the hook that calls the roll."""
    ranks = Ranks(2, Weights(), use_distributed_optimizer=sharded, unused_parameters="zero")

    def run(rank, ddp):
        learned(ddp)
        (ddp.module.c * (rank + 1.0)).sum().backward()
        assert [len(group.intake.roll) for group in ddp.bucket_groups] == [1]
        ddp.finish_grad_sync()
        return ddp.module.c.main_grad[0].item()

    means = ranks.run(run)

    assert 1.5 in means if sharded else means == [1.5, 1.5]  # the shard of one rank has it


def test_a_plain_optimizer_steps_on_the_reduced_gradients_of_a_backward_that_nobody_has_announced():
    ranks = Ranks(2, Weights(), unused_parameters="zero")

    def run(rank, ddp):
        learned(ddp)
        (ddp.module.c * (rank + 1.0)).sum().backward()
        torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()
        return ddp.module.c[0].item()

    assert ranks.run(run) == [-0.5, -0.5]


def test_in_no_sync_a_backward_that_nobody_announces_only_accumulates():
    ranks = Ranks(1, Weights(), unused_parameters="zero")
    (ddp,) = ranks.ddps
    learned(ddp)

    with ddp.no_sync():
        (ddp.module.c * 2.0).sum().backward()

    with pytest.raises(UnreducedGradientsError):
        torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()


@BOTH_MODES
def test_what_is_on_the_roll_of_a_backward_that_fails_is_forgotten_on_all_ranks(sharded):
    ranks = Ranks(2, Weights(), use_distributed_optimizer=sharded)

    def boom(_):
        raise KeyError("boom")

    def run(rank, ddp):
        learned(ddp)
        told = []
        middle = ddp.module.b * 1.0
        if rank == 1:
            middle.register_hook(boom)
        try:
            (ddp(a=1.0) + middle.sum() + ddp(c=1.0, d=1.0)).backward()
            ddp.finish_grad_sync()
        except (KeyError, PeerFailedError) as error:
            told.append(type(error).__name__)
        assert not any(group.intake.roll for group in ddp.bucket_groups)
        ddp.zero_grad()
        return told, step(ddp, a=5.0, b=5.0, c=5.0, d=5.0)

    (here, first), (there, second) = ranks.run(run)

    assert (here, there) == (["PeerFailedError"], ["KeyError"])
    shown = [*first.values(), *second.values()]
    assert 5.0 in shown if sharded else set(shown) == {5.0}


class Rerun(torch.nn.Module):
    """Layers that are rerun in backward, one for each factor, if there are several or ``reruns`` says so."""

    def __init__(self, *, shares, dtype=torch.float32):
        super().__init__()
        self.shares = shares
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)))

    def layer(self, y, factor):
        if self.shares:
            return y + (self.a.view(-1) + self.b.view(-1)) * factor  # both gradients are views of one tensor
        return y + self.a.view(-1) * factor + self.b.view(-1) * factor

    def forward(self, *factors, reruns=False):
        y = self.c.view(-1) * 1.0
        if len(factors) == 1 and not reruns:
            return self.layer(y, *factors).sum()
        for factor in factors:
            y = checkpoint(lambda y, factor=factor: self.layer(y, factor), y, use_reentrant=True)
        return y.sum()


@pytest.mark.parametrize("shares", [False, True])
def test_layers_that_are_rerun_for_the_first_time_bring_the_sum(shares):
    (ddp,) = Ranks(1, Rerun(shares=shares)).ddps
    for _ in range(2):
        ddp(1.0).backward()
        ddp.zero_grad()

    for _ in range(2):
        with ddp.no_sync():
            ddp(2.0, 3.0).backward()
        assert [param.main_grad[0, 0].item() for param in ddp.parameters()] == [5.0, 5.0, 1.0]
        ddp.zero_grad()


def test_what_is_rerun_is_on_no_roll_so_that_sums_are_those_of_the_buffer():
    """In bfloat16, which cannot hold the sum."""
    (ddp,) = Ranks(1, Rerun(shares=False, dtype=torch.bfloat16)).ddps
    for _ in range(2):
        ddp(1.0, reruns=True).backward()
        ddp.zero_grad()

    with ddp.no_sync():
        ddp(1.0, 1 / 256, reruns=True).backward()

    assert [param.main_grad[0, 0].item() for param in ddp.parameters()] == [1 + 1 / 256, 1 + 1 / 256, 1.0]


def test_a_sum_that_autograd_has_spoiled_is_refused_once():
    """The gradients share memory for the first time in the backward that reruns the layer, so nobody could know."""
    (ddp,) = Ranks(1, Rerun(shares=False)).ddps
    for _ in range(2):
        ddp(1.0).backward()
        ddp.zero_grad()
    ddp.module.shares = True

    with pytest.raises(PhaseError, match=r"'[ab]' has received 2 gradients in one backward"):
        ddp(2.0, 3.0).backward()
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(2.0, 3.0).backward()

    assert [param.main_grad[0, 0].item() for param in ddp.parameters()] == [5.0, 5.0, 1.0]


def test_a_kernel_that_begins_to_add_by_itself_is_refused_where_nothing_is_prepared_for_it():
    (ddp,) = Ranks(1, Weights()).ddps
    learned(ddp)
    weight = ddp.module.c

    def add(_):
        weight.main_grad.add_(10)
        weight.grad_added_to_main_grad = True

    middle = ddp.module.c * 1.0
    middle.register_hook(add)

    with pytest.raises(PhaseError, match="a fused kernel added the gradient of 'c' to main_grad"):
        (ddp(a=1.0, b=1.0) + middle.sum() + ddp(d=1.0)).backward()


def test_a_kernel_that_asks_adds_to_what_has_waited_on_a_roll():
    (ddp,) = Ranks(1, Weights()).ddps
    learned(ddp)
    slot = ddp.module.c.main_grad_slot()
    offers = []
    middle = ddp.module.b * 1.0
    middle.register_hook(lambda _: offers.append(slot.prepare_kernel()))  # when the gradient of c has come

    (ddp(a=1.0) + middle.sum() + ddp(c=3.0, d=1.0)).backward()

    assert offers == [None]
    assert main_grads(ddp.module) == {"a": 1.0, "b": 1.0, "c": 3.0, "d": 1.0}


def test_a_place_that_was_zeroed_on_purpose_is_added_to():
    (ddp,) = Ranks(1, Weights()).ddps
    learned(ddp)
    ddp.zero_grad_buffer()
    ddp.module.c.main_grad.fill_(10.0)

    assert step(ddp, a=1.0, b=1.0, c=1.0, d=1.0) == {"a": 1.0, "b": 1.0, "c": 11.0, "d": 1.0}


def test_gradients_that_somebody_clears_between_two_backwards_are_found():
    (ddp,) = Ranks(1, Weights(), unused_parameters="zero").ddps
    learned(ddp)
    with ddp.no_sync():
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()
    ddp.module.c.grad = None

    with ddp.no_sync():
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()

    assert ddp.bucket_groups[0].interrupted == ["c"]


def test_gradients_that_were_stored_one_by_one_and_cleared_are_found_too():
    (ddp,) = Ranks(1, Weights(), unused_parameters="zero").ddps
    learned(ddp)
    handle = ddp.module.a.register_post_accumulate_grad_hook(lambda _: None)
    with ddp.no_sync():
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()
    handle.remove()
    ddp.module.c.grad = None

    with ddp.no_sync():
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()

    assert ddp.bucket_groups[0].interrupted == ["c"]


@BOTH_MODES
def test_a_gradient_that_comes_after_its_group_was_sent_is_found(sharded):
    config = {"use_distributed_optimizer": sharded, "finish": "explicit", "bucket_size": 200}
    (ddp,) = Ranks(1, Weights(), **config).ddps
    learned(ddp)
    learned(ddp)
    ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()

    ddp(d=1.0, c=1.0).backward()

    assert set(ddp.sync.tally.late.params) == {"c", "d"}


def test_a_parameter_that_is_moved_after_its_gradient_was_stored_is_found_in_the_next_step():
    (ddp,) = Ranks(1, Weights(), bucket_size=200).ddps  # d and c, b and a
    learned(ddp)
    learned(ddp)
    place = ddp.module.d.data

    def move(_):
        ddp.module.d.data = place.clone()

    middle = ddp.module.a * 1.0
    middle.register_hook(move)
    (middle.sum() + ddp(b=1.0, c=1.0, d=1.0)).backward()
    ddp.zero_grad()

    with pytest.raises(StorageMovedError, match="'d'"):
        ddp(a=1.0, b=1.0, c=1.0, d=1.0).backward()


def test_where_nothing_can_be_learned_it_is_tried_ever_more_rarely(monkeypatch):
    """Every layer is rerun, so no parameter is ever on a roll."""
    (ddp,) = Ranks(1, Rerun(shares=True)).ddps
    lesson, begun_at, ended = ddp.bucket_groups[0].intake.lesson, [], []
    begin = lesson.begin
    monkeypatch.setattr(lesson, "begin", lambda: (begun_at.append(len(ended) + 1), begin()))
    for _ in range(32):
        ddp(1.0, 1.0).backward()
        ended.append(ddp.zero_grad())

    assert begun_at == [1, 3, 7, 15, 31]
    assert on_roll(ddp) == ""
