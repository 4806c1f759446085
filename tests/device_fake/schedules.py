"""Programs that train on several streams, as a user who knows torch's stream semantics writes them, and how they are drawn.

A model is a row of stages. The branches of a stage run on streams of their own, begin after the main one and are joined by it.
Torch runs each backward node on the stream of its forward, lets it wait for what it gets, and at the end lets the caller's
stream wait for those that leaves ran on: ``Branch`` and ``Loss`` do that here, because on a CPU autograd does not.
"""

from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from fake_accelerator import MAIN
from fake_nccl import FakeNccl, other_ranks
from hypothesis import strategies as st

import megabucket as mb
from megabucket.comm import ProcessGroupCommunicator
from megabucket.errors import PeerFailedError, PhaseError

STREAMS = (MAIN, 1, 2)
COMM_OF_REPLICAS = 96


class Join(torch.autograd.Function):
    """The mean of several branches, on the main stream."""

    @staticmethod
    def forward(ctx, device, *values):
        ctx.device, ctx.stream = device, device.current_id()
        return torch.stack(values).mean()

    @staticmethod
    def backward(ctx, grad):
        enter_node(ctx.device, ctx.stream, grad)
        return None, *(leave_node(ctx.device, grad / len(ctx.needs_input_grad)) for _ in ctx.needs_input_grad[1:])


class Fork(torch.autograd.Function):
    """One value for each branch; in backward the sum of what they give."""

    @staticmethod
    def forward(ctx, device, value, num_branches):
        ctx.device, ctx.stream = device, device.current_id()
        return tuple(value.clone() for _ in range(num_branches))

    @staticmethod
    def backward(ctx, *grads):
        if ctx.device.must_break:
            raise RuntimeError("broken")
        for grad in grads:
            enter_node(ctx.device, ctx.stream, grad)
        return None, leave_node(ctx.device, torch.stack(grads).sum()), None


class Product(torch.autograd.Function):
    """The mean of ``inputs * weight``: reads the weight in forward and in backward."""

    @staticmethod
    def forward(ctx, device, inputs, weight, leaf):
        ctx.device, ctx.stream, ctx.leaf = device, device.current_id(), leaf
        ctx.save_for_backward(inputs, weight)
        return (inputs * weight).mean()

    @staticmethod
    def backward(ctx, grad):
        device, (inputs, weight) = ctx.device, ctx.saved_tensors
        enter_node(device, ctx.stream, grad)
        of_inputs = leave_node(device, (grad * weight).mean()) if ctx.needs_input_grad[1] else None
        of_weight = (grad * inputs).expand_as(weight).clone()
        if ctx.leaf not in (None, ctx.stream):
            leave_node(device, of_weight)
            enter_node(device, ctx.leaf, of_weight)
        device.leaf_streams.add(device.current_id())
        return None, of_inputs, of_weight, None  # the node that accumulates comes next, on this stream


class FusedProduct(torch.autograd.Function):
    """The same, with a kernel that adds to ``main_grad`` where it may, as ``megabucket.fused.Linear`` does."""

    @staticmethod
    def forward(ctx, device, inputs, weight, slot):
        ctx.device, ctx.stream, ctx.slot, ctx.weight = device, device.current_id(), slot, weight
        ctx.save_for_backward(inputs)
        return (inputs * weight.detach()).mean()

    @staticmethod
    def backward(ctx, grad):
        device, slot = ctx.device, ctx.slot
        (inputs,) = ctx.saved_tensors
        enter_node(device, ctx.stream, grad)
        of_inputs = leave_node(device, (grad * ctx.weight.detach()).mean()) if ctx.needs_input_grad[1] else None
        keep = slot.prepare_kernel()
        of_weight = (grad * inputs).expand_as(ctx.weight).clone()
        if keep is not None:
            (slot.view.add_ if keep else slot.view.copy_)(of_weight)
            if slot.param.grad_added_to_main_grad:
                device.switch(device.dummy_streams[slot.name])  # the node that accumulates waits for what it gets, and no more
                return None, of_inputs, None, None
            of_weight = torch.empty_like(of_weight)
            slot.note_kernel(of_weight)
            device.dummy_streams[slot.name] = device.current_id()
        device.record_stream(of_weight)
        if (given := device.given.pop(slot.name, None)) is not None:
            given.wait()  # autograd adds the two
        device.given[slot.name] = device.record()
        device.leaf_streams.add(device.current_id())
        return None, of_inputs, of_weight, None


class Loss(torch.autograd.Function):
    """The first node of a backward, which also does what torch does at its end: leaf streams are joined by the caller's."""

    @staticmethod
    def forward(ctx, device, value):
        ctx.device, ctx.stream = device, device.current_id()
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        device, caller = ctx.device, ctx.device.current()
        leave_node(device, grad)
        device.leaf_streams, device.given = set(), {}

        def end():
            for number in device.leaf_streams - {caller.stream_id}:
                caller.wait_stream(device.stream(number))
            device.switch(caller.stream_id)

        torch.autograd.Variable._execution_engine.queue_callback(end)
        enter_node(device, ctx.stream, grad)
        return None, leave_node(device, grad * 2)


def enter_node(device, stream, grad):
    """Switch to the stream of a backward node, which waits for the gradient that it gets."""
    device.switch(stream)
    device.grad_events[grad.data_ptr()].wait()


def leave_node(device, grad):
    """Return a gradient; a node that gets it can wait for it, and the allocator knows of other streams, as autograd has it."""
    device.record_stream(grad)
    device.grad_events[grad.data_ptr()] = device.record()
    return grad


@dataclass(frozen=True)
class Layer:
    numel: int
    stage: int
    is_fused: bool = False
    is_used_twice: bool = False
    """Whether a fused layer is called on the next stream, too: one dummy stands for both gradients."""
    is_read_by_parent: bool = False
    """Whether the parent reads the weight and never calls the layer, as attention reads its output projection."""


@dataclass(frozen=True)
class Microbatch:
    """On which streams a forward and a backward run."""

    streams: tuple[int, ...]  # of each layer
    leaf: int | None = None
    """The stream of the nodes that accumulate; ``None``: that of the layer."""
    caller: int = MAIN
    """From which the backward is called."""


@dataclass(frozen=True)
class Schedule:
    layers: tuple[Layer, ...]
    steps: tuple[tuple[Microbatch, ...], ...]
    config: dict = field(default_factory=dict)
    clip_grad: float = 0.0
    is_plain: bool = False
    """Whether a plain torch optimizer steps, which it may after an all-reduce."""
    has_replicas: bool = False
    """Whether other ranks hold the same shards."""
    flushes: str = ""
    """What the program calls between backward and the optimizer."""
    zeroes: str = "ddp"
    looks: bool = False
    """Whether the program reads gradients between two microbatches."""
    aborted: int = -1
    """The step that is given up after its backward."""
    broken: int = -1
    """The step whose last backward fails, if the model has two stages."""


class Weight(torch.nn.Module):
    def __init__(self, device, layer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(layer.numel))
        self._device, self._is_fused, self.leaf = device, layer.is_fused, None

    def forward(self, inputs):
        if self._is_fused:
            return FusedProduct.apply(self._device, inputs, self.weight, self.weight.main_grad_slot())
        return Product.apply(self._device, inputs, self.weight, self.leaf)


class Model(torch.nn.Module):
    def __init__(self, device, layers):
        super().__init__()
        self._device, self._plan = device, layers
        self.layers = torch.nn.ModuleList(Weight(device, layer) for layer in layers)
        self.streams = ()

    def forward(self, inputs):
        device, value = self._device, inputs
        main = device.current()
        for stage in range(max(layer.stage for layer in self._plan) + 1):
            own = [index for index, layer in enumerate(self._plan) if layer.stage == stage]
            uses = [(index, self.streams[index]) for index in own]
            uses += [(index, (self.streams[index] + 1) % len(STREAMS)) for index in own if self._plan[index].is_used_twice]
            values = Fork.apply(device, value, len(uses))
            results = [self._branch(main, *use, value) for use, value in zip(uses, values, strict=True)]
            for number in STREAMS:
                main.wait_stream(device.stream(number))
            value = Join.apply(device, *results)
        return value

    def _branch(self, main, index, number, value):
        plan, layer, stream = self._plan[index], self.layers[index], self._device.stream(number)
        self._device.record_stream(value)
        if stream is not main:
            stream.wait_stream(main)
        with stream:
            result = layer.forward(value) if plan.is_read_by_parent else layer(value)
        self._device.record_stream(result)
        return result


def run(device, schedule):
    """Train by a schedule; return how often the host has waited in each step."""
    with groups_of(schedule) as groups:
        return train(device, schedule, groups)


def train(device, schedule, groups):
    device.grad_events, device.dummy_streams, device.must_break = {}, {}, False
    model = Model(device, schedule.layers)
    ddp = mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(**schedule.config), groups=groups)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if not schedule.is_plain:
        optimizer = mb.DistributedOptimizer(optimizer, ddp, clip_grad=schedule.clip_grad)
    waits = []
    for step, microbatches in enumerate(schedule.steps):
        before = device.num_host_waits
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            device.must_break = is_last and step == schedule.broken
            with nullcontext() if is_last else ddp.no_sync():
                is_whole = forward_backward(device, model, ddp, microbatch)
            if schedule.looks and not is_last:
                for param in ddp.parameters():
                    param.main_grad.sum()
        if step == schedule.aborted or not is_whole:
            give_up(ddp)
            continue
        if schedule.flushes:
            getattr(ddp, schedule.flushes)()
        optimizer.step()
        {"ddp": ddp, "optimizer": optimizer}[schedule.zeroes].zero_grad()
        waits.append(device.num_host_waits - before)
    ddp.finish_param_sync()
    for param in ddp.parameters():
        param.detach().sum()  # whoever reads the weights after training
    ddp.detach()
    return waits


@contextmanager
def groups_of(schedule):
    """Two groups for a program with replicas; the other ranks, which give signs of life for one wrapper, do so for both."""
    if not schedule.has_replicas:
        yield None
        return
    with closing(ProcessGroupCommunicator(None)) as inside, other_ranks(), closing(ProcessGroupCommunicator(None)) as over:
        over._group = FakeNccl(0, over.size)  # each communicator of NCCL has a stream
        over._group.stream_number = COMM_OF_REPLICAS
        yield {"dense": mb.ReductionGroup(inside, replicate=over)}


def give_up(ddp):
    """Give up a step, as every rank does here at the same time."""
    with suppress(PhaseError):  # all-reduced gradients are agreed on at the end of backward
        ddp.abort_step("no use")
    with suppress(PeerFailedError):
        ddp.zero_grad()


def forward_backward(device, model, ddp, microbatch):
    model.streams = microbatch.streams
    for layer in model.layers:
        layer.leaf = microbatch.leaf
    loss = Loss.apply(device, ddp(torch.ones(())))
    caller = device.stream(microbatch.caller)
    main = device.current()
    if caller is not main:
        caller.wait_stream(main)
    is_whole = True
    with caller:
        try:
            loss.backward()
        except RuntimeError as error:
            if "broken" not in str(error):
                raise
            is_whole = False
            device.switch(caller.stream_id)
    if caller is not main:
        main.wait_stream(caller)
    return is_whole


# What few drawn programs do: a bucket that two streams read, and a failed backward that has stored gradients on two streams;
# and replicas, which only some have.

SHARED_BUCKET = Schedule(
    (Layer(8, 0), Layer(8, 0)),
    ((Microbatch((1, 2)),),) * 2,
    {"bucket_size": 100_000, "use_distributed_optimizer": True, "overlap_param_gather": True},
)
FAILED_BACKWARD = Schedule(
    (Layer(8, 0), Layer(40_000, 1), Layer(40_000, 1)),
    ((Microbatch((MAIN, 1, 2)),),) * 3,
    {"bucket_size": 100_000},
    broken=1,
)
REPLICAS = Schedule(
    (Layer(8, 0), Layer(40_000, 1), Layer(64, 2)),
    ((Microbatch((MAIN, 1, 2)),),) * 3,
    {"bucket_size": 1, "use_distributed_optimizer": True},
    has_replicas=True,
)


@st.composite
def schedules(draw, *, max_layers=5, max_steps=3):
    """Programs of two or three steps; shrinks to one layer, on the main stream.

    Of a fused layer the gradient is in ``main_grad`` alone, so none is in a program with gradients on other leaf streams.
    """
    num_layers = draw(st.integers(1, max_layers))
    stage = 0
    layers = []
    for index in range(num_layers):
        stage += index > 0 and draw(st.booleans())
        kind = draw(st.sampled_from(["plain", "plain", "fused", "fused twice", "read by the parent"]))
        numel = draw(st.sampled_from([8, 64, 40_000]))  # the last is stored at once
        layers.append(Layer(numel, stage, "fused" in kind, kind == "fused twice", kind == "read by the parent"))
    microbatch = st.builds(
        Microbatch,
        streams=st.tuples(*[st.sampled_from(STREAMS)] * num_layers),
        leaf=st.sampled_from([None, None, MAIN, 2]),
        caller=st.sampled_from([MAIN, MAIN, 3]),
    )
    steps = draw(st.lists(st.lists(microbatch, min_size=1, max_size=2).map(tuple), min_size=2, max_size=max_steps))
    is_sharded = draw(st.booleans())
    config = {
        "bucket_size": draw(st.sampled_from([1, 128, 100_000])),
        "use_distributed_optimizer": is_sharded,
        "overlap_grad_reduce": draw(st.sampled_from([True, True, False])),
        "fence": draw(st.sampled_from([True, True, False])),
        "nonfinite_gradients": draw(st.sampled_from(["error", "allow"])),
    }
    if is_sharded:
        config["overlap_param_gather"] = config["overlap_grad_reduce"] and draw(st.sampled_from([True, True, False]))
    return Schedule(
        tuple(layers),
        tuple(steps),
        config,
        clip_grad=draw(st.sampled_from([0.0, 1.0])),
        is_plain=not is_sharded and draw(st.booleans()),
        has_replicas=is_sharded and draw(st.booleans()),
        flushes=draw(st.sampled_from(["", "start_grad_sync", "finish_grad_sync"])),
        zeroes=draw(st.sampled_from(["ddp", "optimizer"])),
        looks=draw(st.booleans()),
        broken=draw(st.sampled_from([-1, -1, -1, 1])),
        aborted=draw(st.sampled_from([-1, -1, -1, 0])),
    )
