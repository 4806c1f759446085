"""The one entry through which gradients come in: staged or stored, each is in its place once, and nothing else is."""

from types import SimpleNamespace

import pytest
import torch
from fake_device import Device
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megabucket.buffer import GradPhase, ParamAndGradBuffer, _ParamAndGradBucketGroup, dtype_name
from megabucket.buffer import bucket_group as bucket_group_module
from megabucket.buffer.bucket_group import LARGE_BYTES
from megabucket.buffer.grad_slot import GradState
from megabucket.comm import LocalCommunicator
from megabucket.config import DistributedDataParallelConfig
from megabucket.config.resolve import resolve_step
from megabucket.errors import PhaseError
from megabucket.layout import ParamSpec, build_layout

EARLIER = 99.0
"""What places hold from an earlier step. It must show up nowhere."""

BY_HAND = 0.5
"""What somebody has added to a place that was zeroed on purpose. It counts beside the gradients."""


class Group:
    """One bucket group, and what hooks do with gradients; it has learned to expect one gradient of each parameter.

    Args:
        zeroed: positions whose place was zeroed on purpose.
        by_hand: what was added there since.
        may_stage: whether the step would let gradients wait.
    """

    def __init__(self, params, *, zeroed=(), by_hand=0.0, streams=None, may_stage=True):
        self.params, self.backward = list(params), SimpleNamespace(is_last=True, may_stage=may_stage)
        named = {str(position): param for position, param in enumerate(self.params)}
        order = tuple(named)  # otherwise the last parameter comes first
        config = DistributedDataParallelConfig(bucket_order=order)
        specs = [ParamSpec(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in named.items()]
        (layout,) = build_layout(specs, config, dp_size=1).buffers
        self.buffer = ParamAndGradBuffer(layout, named)
        communicator, policy = LocalCommunicator(), resolve_step(config)
        self.group = _ParamAndGradBucketGroup(self.buffer.buckets, index=0, communicator=communicator, policy=policy, divisor=1)
        self.group.streams = streams
        assert self.group.params == self.params
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.hook)
        self.readiness.mark(range(len(self.params)))
        self.readiness.end_step(learns=True)
        for position, slot in enumerate(self.group.slots):
            slot.state = GradState.CLEAN if position in zeroed else GradState.STALE
            slot.view.fill_(by_hand if position in zeroed else EARLIER)
        self.completed_by = []

    @property
    def readiness(self):
        return self.group.readiness

    @property
    def staging(self):
        return self.group.staging

    def hook(self, param):
        """What the hook does that the wrapper installs (``ddp/hooks.py``)."""
        (self.staging.make_hook(self.receive) if param.nbytes <= LARGE_BYTES else self.receive)(param)

    def receive(self, param):
        position = self.group.position_of[id(param)]
        if self.group.receive(position, self.backward):
            self.completed_by.append(position)

    def arrive(self, position, value, *, counts=True):
        """Do what autograd and the hook do; return whether the group is complete."""
        param = self.params[position]
        if self.backward.is_last is not counts:
            self.backward = SimpleNamespace(is_last=counts, may_stage=self.backward.may_stage)
        grad = torch.full(param.shape, float(value), dtype=param.dtype)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)
        num_before = len(self.completed_by)
        with torch.no_grad():
            self.hook(param)
        return len(self.completed_by) > num_before

    def launch(self):
        self.group.start_grad_sync()
        return self.group.missing, self.group.cleared

    @property
    def shown(self):
        return [slot.has_grad and slot.param.grad is slot.view for slot in self.group.slots]

    @property
    def stored(self):
        return [slot.view.flatten()[0].item() for slot in self.group.slots]


def small_params(number, dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(number)]


def small(number, *, dtype=torch.float32, **kwargs):
    return Group(small_params(number, dtype), **kwargs)


@pytest.fixture(autouse=True)
def _small_room(monkeypatch):
    monkeypatch.setattr(bucket_group_module, "MOST_STAGED", 4)


class Operations(TorchDispatchMode):
    """Notes the names of what torch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


arrivals = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 1 / 256, 1e30, 2 / 3])), max_size=30)
some = st.sets(st.integers(0, 5))


@given(st.lists(st.tuples(arrivals, st.booleans()), max_size=4), some, some, st.sampled_from([torch.float32, torch.bfloat16]))
def test_whatever_comes_in_whatever_order_the_places_hold_what_storing_at_once_gives(backwards, cleared, zeroed, dtype):
    """And the group is complete at the same gradient; and the caller's meddling between backwards is found alike."""
    places = {"zeroed": zeroed, "by_hand": BY_HAND, "dtype": dtype}
    staged, at_once = small(6, **places), small(6, **places, may_stage=False)
    for index, (gradients, counts) in enumerate(backwards):
        for position, value in gradients:
            assert staged.arrive(position, value, counts=counts) == at_once.arrive(position, value, counts=counts)
        staged.group.end_backward()
        at_once.group.end_backward()
        assert staged.shown == at_once.shown
        assert staged.stored == at_once.stored
        if index == 1:
            for position in cleared:
                staged.params[position].grad = at_once.params[position].grad = None

    assert staged.launch() == at_once.launch()
    assert staged.stored == at_once.stored
    assert all(param.grad is None for param in staged.params)


@given(arrivals)
def test_without_an_end_of_backward_a_launch_takes_what_is_staged(gradients):
    staged, at_once = small(6), small(6, may_stage=False)
    for group in (staged, at_once):
        for position, value in gradients:
            group.arrive(position, value)

    assert staged.launch() == at_once.launch()
    assert staged.stored == at_once.stored
    assert not staged.staging
    assert staged.staging.room == 0
    assert not any(slot.has_grad for slot in staged.group.slots)


def test_what_is_dropped_is_not_stored():
    group = small(6)
    for position in range(5):
        group.arrive(position, 1)

    group.group.drop_staged()
    group.arrive(0, 2)
    group.arrive(5, 2)
    group.group.end_backward()

    # Of the five, four were stored when the room was full: what comes now overwrites them.
    assert [group.stored[position] for position in (0, 4, 5)] == [2.0, EARLIER, 2.0]
    assert group.shown == [True, False, False, False, False, True]


def test_what_is_dropped_counts_as_no_gradient():
    group = small(6)
    for position in range(5):
        group.arrive(position, 1)

    group.group.drop_staged()

    assert group.launch()[0] == tuple("012345")
    assert group.stored == [0.0] * 6


def test_what_was_sent_in_the_step_before_is_not_sent_again():
    group = small(6)
    for position in range(6):
        group.arrive(position, 1)
    group.launch()
    group.group.finish_grad_sync()

    group.group.reopen()
    group.arrive(0, 2)

    assert group.launch()[0] == tuple("12345")
    assert group.stored == [2.0] + [0.0] * 5


class TestWhenGradientsAreStored:
    def test_small_ones_wait_and_are_stored_in_one_call_when_the_room_is_full(self):
        group = small(6)
        version = group.buffer.grad_data._version

        group.arrive(0, 1)
        room = group.staging.room
        for position in (1, 2):
            group.arrive(position, 1)
        stored_after_three = group.stored[:3]
        group.arrive(3, 1)

        assert room == 3  # the fourth is not left to the hook
        assert stored_after_three == [EARLIER] * 3
        assert group.stored == [1.0] * 4 + [EARLIER] * 2
        assert [param.grad for param in group.params] == [None] * 6  # shown when the backward ends
        assert group.buffer.grad_data._version == version + 4  # each view once: no zeros before

    def test_storing_them_is_one_call_of_torch(self):
        group = small(6)
        for position in range(3):
            group.arrive(position, 1)

        with Operations() as operations:
            group.arrive(3, 1)

        assert [name for name in operations.names if "copy" in name] == ["_foreach_copy_"]

    def test_the_last_one_that_is_expected_stores_all(self):
        group = small(3)

        complete = [group.arrive(position, 1) for position in range(3)]

        assert complete == [False, False, True]
        assert group.stored == [1.0] * 3

    def test_a_large_one_is_stored_at_once_with_what_is_staged(self):
        large = torch.nn.Parameter(torch.zeros(LARGE_BYTES // 4 + 1))
        group = Group([*small_params(2), large, *small_params(1)])

        group.arrive(0, 1)
        group.arrive(2, 2)

        assert group.stored == [1.0, EARLIER, 2.0, EARLIER]
        assert not group.staging

    @pytest.mark.parametrize(("num_bytes", "most"), [(LARGE_BYTES, 8), (LARGE_BYTES // 2, 16), (100_000, 10), (1024, 64)])
    def test_at_most_64_are_staged_and_about_a_mebibyte(self, num_bytes, most, monkeypatch):
        monkeypatch.setattr(bucket_group_module, "MOST_STAGED", 64)
        group = Group([torch.nn.Parameter(torch.zeros(num_bytes // 4)) for _ in range(70)])

        num_staged = 0
        for position in range(70):
            group.arrive(position, 1)
            num_staged = max(num_staged, len(group.staging) + 1)
            if not group.staging:
                break

        assert num_staged == position + 1 == most

    def test_before_anything_is_known_the_room_is_what_fits(self):
        group = small(6)
        group.readiness.end_step(unlearns=True)

        complete = [group.arrive(position, 1) for position in range(6)]

        assert complete == [False] * 6
        assert group.stored == [1.0] * 4 + [EARLIER] * 2

    def test_where_the_step_says_so_none_is_staged_and_each_is_shown_at_once(self):
        group = small(6, may_stage=False)

        group.arrive(0, 1)

        assert group.stored == [1.0] + [EARLIER] * 5
        assert group.shown == [True] + [False] * 5

    def test_the_first_one_of_a_backward_decides_for_all_of_it(self):
        group = small(6, may_stage=False)
        group.arrive(0, 1)
        group.backward.may_stage = True
        group.arrive(1, 1)
        stored_in_the_first = group.stored[:2]

        group.group.end_backward()
        group.arrive(2, 1)

        assert stored_in_the_first == [1.0, 1.0]
        assert len(group.staging) == 1

    def test_in_a_microbatch_that_does_not_count_the_last_expected_one_is_not_waited_for(self):
        group = small(6)
        for position in range(5):
            group.arrive(position, 1)
        group.group.end_backward()

        group.arrive(0, 1, counts=False)

        assert len(group.staging) == 1  # although only that of parameter 5 is missing


class TestWhatIsNotPlain:
    """Second gradients, and such as cannot be copied together with others, in a group whose parameter 0 has them."""

    def test_a_second_gradient_in_one_backward_is_added(self):
        group = small(6)

        for value in (1, 2):
            group.arrive(0, value)  # as a layer that reentrant checkpointing runs twice
        group.group.end_backward()

        assert group.stored[0] == 3.0
        assert group.shown[0]

    def test_in_the_next_microbatch_autograd_adds_in_place(self):
        group = small(6)
        group.arrive(0, 1, counts=False)
        group.group.end_backward()
        version = group.buffer.grad_data._version

        group.arrive(0, 2)
        group.group.end_backward()

        assert group.stored[0] == 3.0
        assert group.buffer.grad_data._version == version + 1

    def test_a_sparse_gradient_becomes_dense_also_after_another_one(self):
        layer = torch.nn.Embedding(4, 2, sparse=True)
        group = Group([layer.weight, *small_params(3)])

        (group.params[1].sum() + layer(torch.tensor([3, 1, 3])).sum()).backward()
        layer(torch.tensor([1])).sum().backward()
        group.group.end_backward()

        assert layer.weight.main_grad.tolist() == [[0, 0], [2, 2], [0, 0], [2, 2]]
        assert group.stored[1] == 1.0

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    def test_a_differentiable_gradient_leaves_its_values_and_not_its_graph(self):
        group = small(2, may_stage=False)  # the step asks whether gradients are switched on

        (group.params[0] ** 2).sum().backward(create_graph=True)
        (group.params[0] ** 2).sum().backward(create_graph=True)

        assert group.stored[0] == 4.0
        assert not group.buffer.grad_data.requires_grad

    def test_a_gradient_that_would_only_fit_by_broadcasting_is_an_error(self):
        group = small(2)
        group.arrive(1, 1)
        group.params[0].data = torch.zeros(1)  # somebody has replaced it

        with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
            group.arrive(0, 1)


class TestOtherPeoplesHooks:
    def test_a_hook_that_was_there_before_finds_the_gradient_in_its_place(self):
        params, seen = small_params(3), []
        params[1].register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
        group = Group(params)
        params[1].register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.tolist()))

        sum(param.sum() for param in params).backward()

        assert seen[1] == [1.0] * 3
        assert group.stored == [1.0] * 3
        assert not group.staging

    def test_a_hook_that_is_added_later_finds_the_gradients_of_the_next_backward(self):
        group, seen = small(3), []
        group.counts = False  # microbatches inside of no_sync()

        def backward():
            for param in group.params:
                param.grad = None
            sum(param.sum() for param in group.params).backward()
            group.group.end_backward()

        backward()
        handle = group.params[0].register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is param.main_grad))
        backward()
        handle.remove()
        group.params[1].grad = None
        group.arrive(1, 1, counts=False)

        assert seen == [True]
        assert len(group.staging) == 1  # with the hook, what it was for is gone


class TestFusedKernels:
    """Kernels that add to ``main_grad`` themselves, in a group where gradients are staged."""

    def kernel(self, group, position, value):
        param = group.params[position]
        param.main_grad.add_(value)
        param.grad_added_to_main_grad = True
        param.grad = torch.full((3,), torch.nan)  # the dummy
        with torch.no_grad():
            group.hook(param)

    def test_the_gradient_of_the_kernel_counts_and_the_dummy_is_dropped(self):
        group = small(3, zeroed=range(3))

        group.arrive(1, 1)
        self.kernel(group, 0, 5.0)
        group.arrive(2, 2)
        group.group.end_backward()

        assert group.stored == [5.0, 1.0, 2.0]
        assert group.completed_by == [2]
        assert group.params[0].grad is None

    def test_a_gradient_of_autograd_after_that_of_the_kernel_is_added(self):
        group = small(3, zeroed=range(3))

        self.kernel(group, 0, 5.0)
        group.arrive(0, 2)
        group.arrive(1, 2)
        group.group.end_backward()

        assert group.stored[:2] == [7.0, 2.0]
        assert group.launch() == (("2",), ())

    def test_a_kernel_that_asks_finds_what_was_staged_and_does_not_write(self):
        group = small(3)
        group.arrive(0, 1)
        slot = group.group.slots[0]

        factor = slot.prepare_kernel()

        assert factor is None
        assert group.stored[0] == 1.0

    def test_a_kernel_that_asks_overwrites_what_an_earlier_step_has_left(self):
        group = small(3)
        group.arrive(1, 1)

        assert group.group.slots[0].prepare_kernel() == 0.0
        assert group.stored[1] == EARLIER  # still staged: it is none of the kernel's business

    def test_a_kernel_does_not_write_while_a_collective_owns_the_gradients(self):
        group = small(3)
        group.group.start_grad_sync()

        assert group.group.grad_phase is GradPhase.IN_FLIGHT
        assert group.group.slots[0].prepare_kernel() is None

    def test_a_kernel_that_brings_the_second_gradient_unasked_is_an_error_at_once(self):
        group = small(3, zeroed=range(3))
        group.arrive(0, 1)

        with pytest.raises(PhaseError, match="a fused kernel added the gradient of '0' to main_grad"):
            self.kernel(group, 0, 5.0)

    def test_a_kernel_that_writes_unasked_where_a_gradient_is_staged_is_an_error(self):
        group = small(3, zeroed=range(3))
        group.arrive(0, 1)
        group.params[0].main_grad.add_(5)
        group.params[0].grad_added_to_main_grad = True

        with pytest.raises(PhaseError, match="a fused kernel added the gradient of '0' to main_grad"):
            group.group.end_backward()


def test_gradients_are_stored_on_the_stream_that_has_computed_them():
    device = Device()
    group = small(6, streams=device.grad_streams())
    stores, store_all = [], group.group._store_all

    def noted(positions, grads):
        stores.append((device.current_stream_id, list(positions)))
        store_all(positions, grads)

    group.group._store_all = noted
    group.arrive(0, 1)
    group.arrive(1, 1)
    device.current_stream_id = 2
    group.params[2].grad = torch.ones(3)
    with torch.no_grad():
        group.group.receive(2, group.backward)  # its hook looks first where it is, so it comes the long way
    device.current_stream_id = 3
    group.group.end_backward()

    assert stores == [(0, [0, 1]), (2, [2])]
    assert device.current_stream_id == 3
    assert device.streams[3].waited_for == [0, 2]  # whoever uses the gradients after backward
    group.launch()
    assert device.streams[3].waited_for == [0, 2, 0, 2]


def test_a_delayed_gradient_on_another_stream_leaves_staged_ones_to_the_stream_that_has_computed_them():
    device, params = Device(), small_params(6)
    params[2].skip_backward_post_hook = True
    group = Group(params, streams=device.grad_streams())
    stores, store_all = [], group.group._store_all

    def noted(positions, grads):
        stores.append((device.current_stream_id, list(positions)))
        store_all(positions, grads)

    group.group._store_all = noted
    for position in (0, 1):
        group.arrive(position, 1)
    device.current_stream_id = 2
    group.params[2].grad = torch.ones(3)
    group.group.receive_delayed(2)
    device.current_stream_id = 3

    assert stores == [(0, [0, 1])]
    group.launch()
    assert device.waited_for == {3: [0, 2]}
