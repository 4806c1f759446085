"""The reduction of moments against runs whose times are known because they were made up, in whole ticks."""

from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import PhaseError
from megabucket.layout import ParamSpec
from megabucket.measure.profile_steps import Event, EventKind, reduce_steps, split_steps
from megabucket.planning.workload import WireBytes

TICKS = st.integers(0, 9)
ROOT = 0


@dataclass
class Model:
    """Modules in the order in which they are called, the parameters each needs, and what everything takes."""

    module_params: list
    forward: list  # per module
    backward: dict  # per parameter that gets a gradient, in ready order
    before: int = 1  # from the start of forward to the first module
    loss: int = 2  # from the end of forward to where the first gradient begins to be computed
    optimizer: int = 3
    buckets: int = 0
    gap: int = 4  # between microbatches and between steps
    num_params: int = field(init=False)

    def __post_init__(self):
        self.num_params = 1 + max(param for params in self.module_params for param in params)

    @property
    def facts(self):
        specs = tuple(ParamSpec(f"p{i}", (i + 1,)) for i in range(self.num_params))
        owners = [
            [(module, ROOT) for module, params in enumerate(self.module_params, start=1) if param in params]
            for param in range(self.num_params)
        ]
        return {"specs": specs, "owners": owners, "wire": WireBytes(parameter=2, gradient=4)}

    def events(self, num_steps, num_microbatches, *, stretched=()):
        """The events of a run. Microbatches whose number is in ``stretched`` take ten times as long everywhere."""
        now, found, number = 100, [], 0

        def note(kind, index=-1):
            found.append(Event(kind, now, index))

        for _ in range(num_steps):
            for _ in range(num_microbatches):
                slow = 10 if number in stretched else 1
                number += 1
                note(EventKind.CALLED, ROOT)
                now += self.before * slow
                for module, ticks in enumerate(self.forward, start=1):
                    note(EventKind.CALLED, module)
                    now += ticks * slow
                note(EventKind.FORWARD_END)
                now += self.loss * slow
                for param, ticks in self.backward.items():
                    now += ticks * slow
                    note(EventKind.READY, param)
                now += self.gap
            note(EventKind.HANDING_OVER)
            now += self.buckets
            note(EventKind.HANDED_OVER)
            note(EventKind.OPTIMIZER)
            now += self.optimizer
            note(EventKind.OPTIMIZER_END)
            now += self.gap
        return found


@st.composite
def models(draw):
    """Every module needs parameters of its own; registered in call order; some get no gradient."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    stops = list(accumulate(sizes))
    module_params = [list(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]
    ready = draw(st.permutations(range(stops[-1])))
    ready = ready[: draw(st.integers(1, len(ready)))]
    return Model(
        module_params,
        forward=[draw(TICKS) for _ in sizes],
        # From 1 on: gradients at the same moment have no order.
        backward={param: draw(st.integers(1, 9)) for param in ready},
        before=draw(TICKS),
        loss=draw(TICKS),
        optimizer=draw(TICKS),
    )


def reduced(model, events):
    return reduce_steps(split_steps(events), **model.facts)


@given(models(), st.integers(1, 4), st.integers(1, 3))
def test_every_tick_of_a_regular_run_comes_out_where_it_was_spent(model, num_steps, num_microbatches):
    reduction = reduced(model, model.events(num_steps, num_microbatches))

    workload = reduction.workload
    assert (workload.num_microbatches, workload.optimizer_s) == (num_microbatches, model.optimizer)
    assert (reduction.facts["num_steps"], reduction.facts["num_microbatches_seen"]) == (num_steps, num_steps * num_microbatches)
    ready = list(model.backward)
    assert list(workload.ready_order[: len(ready)]) == ready
    for position, (param, ticks) in enumerate(model.backward.items()):
        assert workload.tensors[param].backward_s == ticks + (model.loss if position == 0 else 0)
    for module, params in enumerate(model.module_params):
        spent = model.forward[module] + (model.before if module == 0 else 0)
        assert sum(workload.tensors[param].forward_s for param in params) == spent
        # All parameters of a module are there before it computes.
        assert workload.tensors[params[-1]].forward_s >= model.forward[module]
    assert workload.compute_s == num_microbatches * (workload.forward_s + workload.backward_s) + model.optimizer
    assert workload.forward_s == model.before + sum(model.forward)
    assert workload.backward_s == model.loss + sum(model.backward.values())


@given(models())
def test_a_parameter_without_a_gradient_takes_no_time_and_is_ready_last(model):
    reduction = reduced(model, model.events(2, 1))

    unused = [i for i in range(model.num_params) if i not in model.backward]
    assert reduction.facts["unused"] == [f"p{i}" for i in unused]
    assert list(reduction.workload.ready_order[len(model.backward) :]) == unused[::-1]
    assert all(reduction.workload.tensors[i].backward_s == 0 for i in unused)


@given(models(), st.integers(1, 7), st.data())
def test_disturbances_in_fewer_than_half_of_the_microbatches_change_nothing(model, num_steps, data):
    microbatches = 2 * num_steps
    stretched = data.draw(st.sets(st.integers(0, microbatches - 1), max_size=(microbatches - 1) // 2))

    disturbed = reduced(model, model.events(num_steps, 2, stretched=stretched)).workload

    calm = reduced(model, model.events(num_steps, 2)).workload
    assert disturbed == calm


@given(models(), st.integers(1, 50))
def test_handing_over_counts_in_backward_shared_out_by_elements(model, buckets):
    plain = reduced(model, model.events(2, 2)).workload

    workload = reduced(model, replace(model, buckets=buckets).events(2, 2)).workload

    assert workload.backward_s == pytest.approx(plain.backward_s + buckets)
    specs = model.facts["specs"]
    numel = sum(spec.numel for spec in specs)
    for spec, tensor, before in zip(specs, workload.tensors, plain.tensors, strict=True):
        assert tensor.backward_s - before.backward_s == pytest.approx(buckets * spec.numel / numel)


def test_the_other_end_of_a_tied_weight_lengthens_the_module_before_it():
    # Embedding (p0), block (p1), and the head, which needs p0 again and computes for 8 ticks.
    model = Model([[0], [1], [0]], forward=[2, 3, 8], backward={1: 1, 0: 1}, before=0)

    workload = reduced(model, model.events(2, 1)).workload

    assert [tensor.forward_s for tensor in workload.tensors] == [2, 11]


def test_a_gradient_that_comes_in_parts_is_ready_with_the_last_one():
    model = Model([[0, 1]], forward=[1], backward={0: 2, 1: 3})
    (forward, need, end, first, second, *rest) = model.events(1, 1)
    again = Event(EventKind.READY, second.moment_s + 5, 0)

    events = [forward, need, end, first, second, again, *rest]
    workload = reduced(model, events).workload

    assert workload.ready_order == (1, 0)
    assert [tensor.backward_s for tensor in workload.tensors] == [5, 2 + 2 + 3]


def test_parameters_needed_in_another_order_than_registered_are_told():
    model = Model([[1], [0]], forward=[2, 3], backward={0: 1, 1: 1}, before=0)

    reduction = reduced(model, model.events(1, 1))

    assert [tensor.forward_s for tensor in reduction.workload.tensors] == [3, 2]
    assert not reduction.facts["is_forward_in_registration_order"]


def test_a_step_may_be_ended_by_hand_where_no_optimizer_is_heard_of():
    model = Model([[0]], forward=[1], backward={0: 1})
    events = []
    for event in model.events(3, 2):
        if event.kind is EventKind.OPTIMIZER:
            events.append(replace(event, kind=EventKind.STEP_END))
        elif event.kind is not EventKind.OPTIMIZER_END:
            events.append(event)

    workload = reduced(model, events).workload

    assert (workload.num_microbatches, workload.optimizer_s) == (2, 0)


def test_without_any_end_of_a_step_every_microbatch_is_one():
    model = Model([[0]], forward=[1], backward={0: 1})
    passes = (EventKind.CALLED, EventKind.FORWARD_END, EventKind.READY)
    events = [event for event in model.events(2, 3) if event.kind in passes]

    reduction = reduced(model, events)

    assert (reduction.workload.num_microbatches, reduction.facts["num_steps"]) == (1, 6)


def test_an_optimizer_inside_of_another_counts_once_and_one_that_failed_does_not():
    model = Model([[0]], forward=[1], backward={0: 1})
    optimizer, end = EventKind.OPTIMIZER, EventKind.OPTIMIZER_END
    passes = [event for event in model.events(1, 1) if event.kind not in (optimizer, end)]

    def run(*kinds):
        now = passes[-1].moment_s
        steps = [passes, [Event(kind, now + 10 * position) for position, kind in enumerate(kinds)]]
        later = [
            replace(event, moment_s=event.moment_s + 1_000) for event in (*steps[0], Event(optimizer, now), Event(end, now + 7))
        ]
        return split_steps([*steps[0], *steps[1], *later])

    assert [step.optimizer_s for step in run(optimizer, optimizer, end, end)] == [30, 7]
    assert [step.optimizer_s for step in run(optimizer, end, optimizer, end)] == [20, 7]
    assert [step.optimizer_s for step in run(optimizer)] == [7]


def test_a_step_that_was_cut_off_does_not_count():
    model = Model([[0]], forward=[1], backward={0: 1})
    events = model.events(3, 2)
    cut = max(i for i, event in enumerate(events) if event.kind is EventKind.OPTIMIZER)

    assert reduced(model, events[:cut]).facts["num_steps"] == 2


def test_a_forward_without_a_backward_begins_no_microbatch():
    model = Model([[0]], forward=[1], backward={0: 1})
    validation = [Event(EventKind.CALLED, 10, ROOT), Event(EventKind.CALLED, 11, 1), Event(EventKind.FORWARD_END, 12)]
    later = [replace(event, moment_s=event.moment_s + 10_000) for event in validation]

    reduction = reduced(model, model.events(2, 1) + later)

    assert reduction.workload == reduced(model, model.events(2, 1)).workload


def test_a_model_whose_forward_is_never_called_as_a_whole_is_measured_from_its_modules():
    model = Model([[0], [1]], forward=[2, 3], backward={1: 4, 0: 5}, before=0, loss=0)
    events = [
        event
        for event in model.events(2, 1)
        if event.kind is not EventKind.FORWARD_END and (event.kind, event.index) != (EventKind.CALLED, ROOT)
    ]

    workload = reduced(model, events).workload

    assert [tensor.forward_s for tensor in workload.tensors] == [2, 7]  # until the first gradient
    assert [tensor.backward_s for tensor in workload.tensors] == [5, 0]


@pytest.mark.parametrize("events", [[], [Event(EventKind.CALLED, 1.0, ROOT), Event(EventKind.OPTIMIZER_END, 2.0)]])
def test_a_run_without_a_backward_is_refused(events):
    model = Model([[0]], forward=[1], backward={0: 1})

    with pytest.raises(PhaseError, match="no step was profiled"):
        reduced(model, events)
