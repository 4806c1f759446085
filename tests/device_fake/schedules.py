"""Programs that train on several streams, as a user who knows torch's stream semantics writes them, and how they are drawn.

A model is a row of stages. The branches of a stage run on streams of their own, begin after the main one and are joined by it.
Torch runs each backward node on the stream of its forward, lets it wait for what it gets, and at the end lets the caller's
stream wait for those that leaves ran on: ``Branch`` and ``Loss`` do that here, because on a CPU autograd does not.
"""

import _thread
import threading
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from fake_accelerator import MAIN, Observer
from fake_nccl import FakeNccl, other_ranks
from hypothesis import strategies as st

import megabucket as mb
from megabucket.checkpoint.capture import to_host
from megabucket.checkpoint.format import Piece, Snapshot
from megabucket.comm import ProcessGroupCommunicator
from megabucket.errors import PeerFailedError, PhaseError

STREAMS = (MAIN, 1, 2)
COMM_OF_REPLICAS, COMM_OF_COPIES = 96, 95
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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


class DelayedProduct(torch.autograd.Function):
    """The same; the weight's gradient is computed by ``compute_delayed``, after backward."""

    @staticmethod
    def forward(ctx, device, inputs, weight):
        ctx.device, ctx.stream, ctx.weight = device, device.current_id(), weight
        ctx.save_for_backward(inputs)
        return (inputs * weight.detach()).mean()

    @staticmethod
    def backward(ctx, grad):
        device, (inputs,) = ctx.device, ctx.saved_tensors
        enter_node(device, ctx.stream, grad)
        device.record_stream(inputs)
        device.delayed.append((ctx.weight, grad, inputs, device.record()))
        return None, leave_node(device, (grad * ctx.weight.detach()).mean()) if ctx.needs_input_grad[1] else None, None


def compute_delayed(device, ddp, stream):
    """Compute the gradients that the last backward has left for later, on a stream that nothing waits for here."""
    for weight, grad, inputs, event in device.delayed:
        with device.stream(stream):
            event.wait()
            weight.grad = (grad * inputs).expand_as(weight).clone()
            ddp.grad_ready(weight)
    device.delayed.clear()


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
    is_delayed: bool = False
    """Whether the gradient is computed apart from backward."""
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
    in_thread: bool = False
    """Whether the backward runs in a thread that Python has not made, as autograd has one for a device."""
    delayed: int = MAIN
    """The stream of delayed gradients."""


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
    has_copies: bool = False
    """Whether other ranks have parts of each gradient; then the norm is that of a group of its own, too."""
    num_tokens: int | None = None
    """By which ``finalize_grads`` divides."""
    half: str = ""
    """The dtype of parameters and buffers, if it has 16 bits."""
    forces_all_reduce: bool = False
    averages: bool = False
    """Whether the program keeps an average of the weights, and looks at the norms of each parameter."""
    saves: bool = False
    """Whether it takes a checkpoint at the end, and the state of the optimizer."""
    scales_loss: bool = False
    flushes: str = ""
    """What the program calls between backward and the optimizer."""
    zeroes: str = "ddp"
    sets_to_none: bool = True
    looks: bool = False
    """Whether the program reads gradients between two microbatches."""
    aborted: int = -1
    """The step that is given up after its backward."""
    broken: int = -1
    """The step whose last backward fails, if the model has two stages."""


class Weight(torch.nn.Module):
    def __init__(self, device, layer, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(layer.numel, dtype=dtype))
        self.weight.skip_backward_post_hook = layer.is_delayed
        self._device, self._is_fused, self._is_delayed, self.leaf = device, layer.is_fused, layer.is_delayed, None

    def forward(self, inputs):
        if self._is_delayed:
            return DelayedProduct.apply(self._device, inputs, self.weight)
        if self._is_fused:
            return FusedProduct.apply(self._device, inputs, self.weight, self.weight.main_grad_slot())
        return Product.apply(self._device, inputs, self.weight, self.leaf)


class Model(torch.nn.Module):
    def __init__(self, device, layers, dtype):
        super().__init__()
        self._device, self._plan, self.dtype = device, layers, dtype
        self.layers = torch.nn.ModuleList(Weight(device, layer, dtype) for layer in layers)
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
        program = Program(device, schedule, groups)
        try:
            return program.train()
        finally:
            program.ddp.detach()


class Program:
    """A schedule with all that it trains."""

    def __init__(self, device, schedule, groups):
        device.grad_events, device.dummy_streams, device.must_break, device.delayed = {}, {}, False, []
        self.device, self.schedule = device, schedule
        self.model = Model(device, schedule.layers, HALVES.get(schedule.half, torch.float32))
        for param in self.model.parameters():
            param.sequence_parallel = schedule.has_copies
        config = mb.DistributedDataParallelConfig(grad_reduce_in_fp32=not schedule.half, **schedule.config)
        self.ddp = mb.DistributedDataParallel(self.model, config, groups=groups)
        self.ddp.force_all_reduce = schedule.forces_all_reduce
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        if not schedule.is_plain:
            self.optimizer = mb.DistributedOptimizer(self.optimizer, self.ddp, clip_grad=schedule.clip_grad)
        self.average = mb.ShardedEMA(self.optimizer, decay=0.5) if schedule.averages else None
        # Torch's scaler must meet a gradient, and none in float16. A delayed one is in no ``.grad`` before it is sent.
        is_sharded = config.use_distributed_optimizer and not schedule.forces_all_reduce
        is_taken = (is_sharded or schedule.half != "float16") and not all(layer.is_delayed for layer in schedule.layers)
        scales_loss = schedule.scales_loss and is_taken
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scales_loss)

    def train(self):
        """Return how often the host has waited in each step."""
        waits = []
        for step, microbatches in enumerate(self.schedule.steps):
            before = self.device.num_host_waits
            is_whole = self.run_microbatches(microbatches, breaks=step == self.schedule.broken)
            if step == self.schedule.aborted or not is_whole:
                give_up(self.ddp)
            else:
                self.update()
                waits.append(self.device.num_host_waits - before)
        self.ddp.finish_param_sync()
        for param in self.ddp.parameters():
            param.detach().sum()  # whoever reads the weights after training
        if self.schedule.saves:
            read_state(self.optimizer, self.ddp)
        return waits

    def run_microbatches(self, microbatches, *, breaks):
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            self.device.must_break = is_last and breaks
            with nullcontext() if is_last else self.ddp.no_sync():
                is_whole = forward_backward(self.device, self.model, self.ddp, microbatch, self.scaler)
            compute_delayed(self.device, self.ddp, microbatch.delayed)
            if self.schedule.looks and not is_last:
                self.device.current().wait_stream(self.device.stream(microbatch.delayed))
                for param in self.ddp.parameters():
                    param.main_grad.sum()
        return is_whole

    def update(self):
        if self.schedule.has_copies:
            mb.finalize_grads(self.ddp, num_tokens=self.schedule.num_tokens)
        elif self.schedule.flushes:
            getattr(self.ddp, self.schedule.flushes)()
        with mb.param_norms(self.optimizer) if self.average else nullcontext():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update()
        {"ddp": self.ddp, "optimizer": self.optimizer}[self.schedule.zeroes].zero_grad(self.schedule.sets_to_none)


def read_state(optimizer, ddp):
    """Read on the host copies such as a checkpoint makes, and on the device what ``state_dict`` returns."""
    pieces = [Piece(None, 0, param.numel(), param.detach().flatten()) for param in ddp.parameters()]
    for piece in to_host(Snapshot(pieces, {})).pieces:
        piece.values.tolist()
    for state in optimizer.state_dict()["state"].values():
        for values in filter(torch.is_tensor, state.values()):
            values.sum()


@contextmanager
def groups_of(schedule):
    """The groups of a program; the other ranks, which give signs of life for one wrapper, do so for all."""
    if not (schedule.has_replicas or schedule.has_copies):
        yield None
        return
    with ExitStack() as made:

        def communicator(stream_number=None):
            one = made.enter_context(closing(ProcessGroupCommunicator(None)))
            if stream_number is not None:
                one._group = FakeNccl(0, one.size)  # each communicator of NCCL has a stream
                one._group.stream_number = stream_number
            return one

        inside = communicator()
        made.enter_context(other_ranks())
        over = communicator(COMM_OF_REPLICAS) if schedule.has_replicas else None
        reduction = {"dense": mb.ReductionGroup(inside, replicate=over)}
        if not schedule.has_copies:
            yield reduction
            return
        copies = communicator(COMM_OF_COPIES)
        stages = {} if schedule.num_tokens is None else {"pp": copies}
        yield mb.ParallelGroups(reduction, copies={"tp": copies, **stages}, norm_group=copies, step_group=inside)


def give_up(ddp):
    """Give up a step, as every rank does here at the same time."""
    with suppress(PhaseError):  # all-reduced gradients are agreed on at the end of backward
        ddp.abort_step("no use")
    with suppress(PeerFailedError):
        ddp.zero_grad()


def in_a_thread_of_autograd(device, run):
    """Run in a thread that Python has not made, as that which autograd has for a device."""
    raised, is_done = [], threading.Event()

    def work():
        try:
            with Observer(device):
                run()
        except BaseException as error:
            raised.append(error)
        finally:
            is_done.set()

    _thread.start_new_thread(work, ())
    is_done.wait()
    if raised:
        raise raised[0]


def forward_backward(device, model, ddp, microbatch, scaler):
    model.streams = microbatch.streams
    for layer in model.layers:
        layer.leaf = microbatch.leaf
    loss = scaler.scale(Loss.apply(device, ddp(torch.ones((), dtype=model.dtype))))
    caller = device.stream(microbatch.caller)
    main = device.current()
    if caller is not main:
        caller.wait_stream(main)
    is_whole = True

    def backward():
        nonlocal is_whole
        with caller:
            try:
                loss.backward()
            except RuntimeError as error:
                if "broken" not in str(error):
                    raise
                is_whole = False
                device.switch(caller.stream_id)
                device.delayed.clear()

    if microbatch.in_thread:
        in_a_thread_of_autograd(device, backward)
    else:
        backward()
    if caller is not main:
        main.wait_stream(caller)
    return is_whole


# What few drawn programs do.

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
HALF_REPLICAS = replace(REPLICAS, half="bfloat16")
WIDE_SUMS = Schedule(
    (Layer(8, 0), Layer(40_000, 1)),
    ((Microbatch((MAIN, 1)),),) * 2,
    {"bucket_size": 1, "use_distributed_optimizer": True, "reduce_scatter_with_fp32_accumulation": True},
    half="bfloat16",
    forces_all_reduce=True,
)
RANK_ORDER = Schedule(
    (Layer(8, 0), Layer(40_000, 1), Layer(64, 1)),
    ((Microbatch((MAIN, 1, 2)),),) * 3,
    {"bucket_size": 1, "reduction_order": "rank"},
)
HALF_RANK_ORDER = replace(RANK_ORDER, half="bfloat16", clip_grad=1.0)
REPLICAS_IN_RANK_ORDER = replace(HALF_REPLICAS, config={**HALF_REPLICAS.config, "reduction_order": "rank"}, clip_grad=1.0)
DELAYED = Schedule(
    (Layer(8, 0, is_delayed=True), Layer(8, 0)),
    ((Microbatch((MAIN, 1), delayed=2),) * 2,) * 3,
    {"bucket_size": 100_000, "use_distributed_optimizer": True},
)
COPIES = Schedule(
    (Layer(8, 0), Layer(64, 1)),
    ((Microbatch((MAIN, 1)),),) * 2,
    {"bucket_size": 1, "use_distributed_optimizer": True, "grad_reduction": "sum"},
    has_copies=True,
    num_tokens=8,
    averages=True,
)
SAVED = Schedule(
    (Layer(8, 0), Layer(64, 1)),
    ((Microbatch((MAIN, 1)),),) * 2,
    {"bucket_size": 1, "use_distributed_optimizer": True},
    saves=True,
)
EXAMPLES = {
    "a shared bucket": SHARED_BUCKET,
    "a failed backward": FAILED_BACKWARD,
    "replicas": REPLICAS,
    "replicas of 16 bits": HALF_REPLICAS,
    "16 bits summed in 32": WIDE_SUMS,
    "sums in rank order": RANK_ORDER,
    "16 bits in rank order": HALF_RANK_ORDER,
    "replicas in rank order": REPLICAS_IN_RANK_ORDER,
    "delayed gradients": DELAYED,
    "copies and averages": COPIES,
    "a checkpoint": SAVED,
    "a step that is given up": replace(SAVED, aborted=0),
}


@st.composite
def schedules(draw, *, max_layers=5, max_steps=3):
    """Programs of two or three steps; shrinks to one layer, on the main stream.

    Of a fused layer the gradient is in ``main_grad`` alone, so none is in a program with gradients on other leaf streams.
    """
    num_layers = draw(st.integers(1, max_layers))
    is_sharded, is_explicit = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    is_finished_later = is_sharded or is_explicit
    stage = 0
    layers = []
    for index in range(num_layers):
        stage += index > 0 and draw(st.booleans())
        kinds = ["plain", "plain", "fused", "fused twice", "read by the parent"] + ["delayed"] * is_finished_later
        kind = draw(st.sampled_from(kinds))
        numel = draw(st.sampled_from([8, 64, 40_000]))  # the last is stored at once
        is_kind = {"is_used_twice": "fused twice", "is_read_by_parent": "read by the parent", "is_delayed": "delayed"}
        layers.append(Layer(numel, stage, "fused" in kind, **{name: kind == one for name, one in is_kind.items()}))
    microbatch = st.builds(
        Microbatch,
        streams=st.tuples(*[st.sampled_from(STREAMS)] * num_layers),
        leaf=st.sampled_from([None, None, MAIN, 2]),
        caller=st.sampled_from([MAIN, MAIN, 3]),
        in_thread=st.sampled_from([False, False, True]),
        delayed=st.sampled_from(STREAMS),
    )
    steps = draw(st.lists(st.lists(microbatch, min_size=1, max_size=2).map(tuple), min_size=2, max_size=max_steps))
    config = {
        "bucket_size": draw(st.sampled_from([1, 128, 100_000])),
        "use_distributed_optimizer": is_sharded,
        "overlap_grad_reduce": draw(st.sampled_from([True, True, False])),
        "fence": draw(st.sampled_from([True, True, False])),
        "nonfinite_gradients": draw(st.sampled_from(["error", "allow"])),
        "finish": "explicit" if is_explicit else "auto",
        "bucket_groups": draw(st.sampled_from(["per_bucket", "per_bucket", "single"])),
        "reduction_order": draw(st.sampled_from(["backend", "backend", "rank"])),
    }
    half = draw(st.sampled_from(["", "", *HALVES]))
    is_plain = not is_sharded and draw(st.booleans())
    has_copies = draw(st.sampled_from([False, False, True]))
    num_tokens = draw(st.sampled_from([None, 8])) if has_copies and is_finished_later else None
    config["grad_reduction"] = "mean" if num_tokens is None else "sum"
    has_replicas = is_sharded and draw(st.booleans())
    if is_sharded:
        config["reduce_scatter_with_fp32_accumulation"] = bool(half) and not has_replicas and draw(st.booleans())
        config["overlap_param_gather"] = config["overlap_grad_reduce"] and draw(st.sampled_from([True, True, False]))
    return Schedule(
        tuple(layers),
        tuple(steps),
        config,
        clip_grad=draw(st.sampled_from([0.0, 1.0])),
        is_plain=is_plain,
        has_replicas=has_replicas,
        has_copies=has_copies,
        num_tokens=num_tokens,
        half=half,
        forces_all_reduce=is_sharded and draw(st.sampled_from([False, False, True])),
        averages=not is_plain and draw(st.sampled_from([False, False, True])),
        saves=draw(st.sampled_from([False, False, True])),
        scales_loss=config["nonfinite_gradients"] == "allow" and not is_plain and draw(st.booleans()),
        flushes="finish_grad_sync" if is_explicit else draw(st.sampled_from(["", "start_grad_sync", "finish_grad_sync"])),
        # A plain optimizer's tells the wrapper nothing, and a delayed gradient begins no step.
        zeroes="ddp" if is_plain and any(layer.is_delayed for layer in layers) else draw(st.sampled_from(["ddp", "optimizer"])),
        looks=draw(st.booleans()),
        broken=draw(st.sampled_from([-1, -1, -1, 1])),
        aborted=draw(st.sampled_from([-1, -1, -1, 0])),
    )
