"""How gradients that wait are stored: on the stream that has computed them, once, and never in place of something else."""

import pytest
import torch
from fake_device import Device
from hypothesis import given
from hypothesis import strategies as st

from megabucket.buffer import intake as intake_module
from megabucket.buffer.grad_slot import GradSlot
from megabucket.buffer.intake import GradIntake
from megabucket.buffer.readiness import Readiness


class Group:
    """Parameters of three elements, their places, and what hooks do with gradients. Places hold values of an earlier step."""

    def __init__(self, num_params, *, zeroed=(), dtype=torch.float32, streams=None, waits=True):
        self.params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(num_params)]
        for param in self.params:
            param.grad_added_to_main_grad = False
            param.grad_dtype = None
            if waits:
                param.register_post_accumulate_grad_hook(lambda _: None)
        self.slots = [GradSlot(str(i), param, torch.full((3,), 99.0)) for i, param in enumerate(self.params)]
        for position, slot in enumerate(self.slots):
            slot.is_clean = position in zeroed
            if slot.is_clean:
                slot.view.zero_()
        self.readiness, self.interrupted = Readiness(num_params), []
        self.readiness.mark_all(range(num_params))
        self.readiness.finish_step()
        self.intake = GradIntake(self.slots, self.readiness, self.interrupted, streams)

    def arrive(self, position, value, *, counts=True):
        """Do what autograd and the hook do; return whether the group is complete."""
        param, waiting = self.params[position], self.intake.waiting
        grad = torch.full((3,), float(value), dtype=param.dtype)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)
        if len(waiting) < waiting.room:
            waiting.add(param)
            return False
        with torch.no_grad():
            return self.intake.receive(position, counts=counts, may_wait=True)

    @property
    def shown(self):
        return [slot.has_grad and slot.param.grad is slot.view for slot in self.slots]

    @property
    def stored(self):
        return [slot.view[0].item() for slot in self.slots]


@pytest.fixture(autouse=True)
def _small_room(monkeypatch):
    monkeypatch.setattr(intake_module, "MOST_WAITING", 4)


arrivals = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 1 / 256, 1e30, 2 / 3])), max_size=30)


some = st.sets(st.integers(0, 5))


@given(st.lists(st.tuples(arrivals, st.booleans()), max_size=4), some, some, st.sampled_from([torch.float32, torch.bfloat16]))
def test_whatever_comes_in_whatever_order_the_places_hold_what_storing_at_once_gives(backwards, cleared, zeroed, dtype):
    """And the group is complete at the same gradient; and the caller's meddling between backwards is found alike."""
    waiting, at_once = (Group(6, zeroed=zeroed, dtype=dtype, waits=waits) for waits in (True, False))
    for index, (gradients, counts) in enumerate(backwards):
        for position, value in gradients:
            assert waiting.arrive(position, value, counts=counts) == at_once.arrive(position, value, counts=counts)
        waiting.intake.close()
        at_once.intake.close()
        assert waiting.shown == at_once.shown
        assert waiting.stored == at_once.stored
        if index == 1:
            for position in cleared:
                waiting.params[position].grad = at_once.params[position].grad = None

    assert waiting.intake.hand_over() == at_once.intake.hand_over()
    assert waiting.stored == at_once.stored
    assert sorted(waiting.interrupted) == sorted(at_once.interrupted)
    assert all(param.grad is None for param in waiting.params)


@given(arrivals)
def test_without_an_end_of_backward_a_launch_takes_what_waits(gradients):
    waiting, at_once = Group(6), Group(6, waits=False)
    for group in (waiting, at_once):
        for position, value in gradients:
            group.arrive(position, value)

    assert waiting.intake.hand_over() == at_once.intake.hand_over()
    assert waiting.stored == at_once.stored
    assert not waiting.intake.waiting
    assert waiting.intake.waiting.room == 0
    assert not any(slot.is_released or slot.has_received for slot in waiting.slots)


def test_what_is_dropped_is_not_stored():
    group = Group(6)
    for position in range(5):
        group.arrive(position, 1)

    group.intake.drop()
    for slot in group.slots:
        slot.param.grad = None
    group.arrive(5, 2)
    group.intake.close()

    assert group.stored[4:] == [99.0, 2.0]
    assert not any(slot.is_released for slot in group.slots)


def test_gradients_are_stored_on_the_stream_that_has_computed_them():
    device = Device()
    group = Group(6, streams=device.grad_streams())
    stores, store_all = [], intake_module.store_all

    def noted(slots, *args, **kwargs):
        stores.append((device.current, [slot.name for slot in slots]))
        store_all(slots, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake_module, "store_all", noted)
        group.arrive(0, 1)
        group.arrive(1, 1)
        device.current = 2
        group.params[2].grad = torch.ones(3)
        with torch.no_grad():
            group.intake.receive(2, counts=True, may_wait=True)  # its hook looks first where it is, so it comes the long way
        device.current = 3
        group.intake.close()

    assert stores == [(0, ["0", "1"]), (2, ["2"])]
    assert device.current == 3
    assert device.streams[3].waited_for == [2]  # whoever uses the gradients after backward
    group.intake.hand_over()
    assert sorted(device.streams[3].waited_for) == [0, 2, 2]
