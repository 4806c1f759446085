"""Every call that makes tensors, in three parts: what is prepared, the call, and what its results have to be used for."""

import contextlib
import copy

import torch

import megabucket as mb


@contextlib.contextmanager
def default_device(name):
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None if before == torch.device("cpu") else before)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Default dtypes are those of the process, all other modes those of one thread.
THREAD_MODES = {
    "inference": torch.inference_mode,
    "default device": lambda: default_device("meta"),
}
PROCESS_MODES = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
}
SHARDED = {"use_distributed_optimizer": True, "bucket_size": 20}
CASES = {
    "all-reduce": (torch.float32, {}),
    "overlapped gather": (torch.float32, {**SHARDED, "overlap_param_gather": True}),
    "reduce-scatter, bfloat16": (
        torch.bfloat16,
        {**SHARDED, "grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True},
    ),
}


class Model(torch.nn.Module):
    """Two layers that are trained, a frozen one and a module buffer; the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        for value, param in enumerate(self.parameters()):
            torch.nn.init.constant_(param, 0.1 * (value + 1))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x):
        return self.frozen(self.last(torch.tanh(self.first(x)))) + self.shift


class Run:
    """One rank.

    ``ranks`` are the arguments that tell a wrapper its ranks.
    """

    def __init__(self, rank, case, directory, **ranks):
        self.rank, self.ranks, self.directory = rank, ranks, directory
        dtype, switches = CASES[case]
        self.module = Model().to(dtype)
        self.config = mb.DistributedDataParallelConfig(nonfinite_gradients="allow", **switches)
        self.num_steps = 0
        self.ema = self.optimizer = None

    def wrap(self):
        self.ddp = mb.DistributedDataParallel(self.module, self.config, **self.ranks)

    def own(self, make=lambda params: torch.optim.AdamW(params, lr=0.01)):
        params = [param for param in self.ddp.module.parameters() if param.requires_grad]
        self.optimizer = mb.DistributedOptimizer(make(params), self.ddp, clip_grad=1.0)
        self.ema = mb.ShardedEMA(self.optimizer, decay=0.9)

    def loss(self):
        self.num_steps += 1
        generator = torch.Generator().manual_seed(10 * self.num_steps + self.rank)
        x = torch.randn(3, 4, generator=generator, dtype=torch.float32, device="cpu")
        return self.ddp(x.to(self.module.shift.dtype)).square().mean()

    def backward(self):
        self.loss().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.ema.update()
        self.optimizer.zero_grad()

    def bits(self):
        """All that training has made: weights, state of the optimizer, average."""
        self.ddp.finish_param_sync()
        weights = [value.clone() for value in self.module.state_dict().values()]
        state = copy.deepcopy(self.optimizer.state_dict())
        tensors = [value for of_param in state["state"].values() for value in of_param.values()]
        # Torch's own step counts have the default dtype.
        return [*weights, *(value.double() if isinstance(value, torch.Tensor) else value for value in tensors)]


def prepared(run, *, steps=2, make=None):
    run.wrap()
    run.own(*([] if make is None else [make]))
    for _ in range(steps):
        run.step()


def with_gradients(run):
    prepared(run)
    run.backward()


def finish_step(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


def nothing(run):
    pass


def load_own_state(run):
    run.optimizer.load_state_dict(run.saved)


def save_state(run):
    prepared(run)
    run.saved = copy.deepcopy(run.optimizer.state_dict())
    run.step()


def make_state(run):
    run.saved = run.optimizer.state_dict(), run.ddp.state_dict(), run.ema.values()


def train_plainly_with_the_results(run):
    """A plain optimizer takes the state, plain modules the weights and the average, and both train on."""
    state, weights, average = run.saved
    for values, strict in ((weights, True), (average, False)):
        plain = Model().to(run.module.shift.dtype)
        plain.load_state_dict(values, strict=strict)
        adam = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad])
        adam.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        plain(torch.ones(2, 4, dtype=plain.shift.dtype)).sum().backward()
        adam.step()
        for one in adam.state.values():
            assert not any(value.is_inference() for value in one.values())


def load_weights(run):
    run.ddp.load_state_dict({name: value * 0.5 for name, value in run.ddp.state_dict().items()})


def save(run):
    mb.save_checkpoint(run.directory, run.ddp, run.optimizer, step=1)


def load(run):
    mb.load_checkpoint(run.directory, run.ddp, run.optimizer)


def saved_and_moved_on(run):
    prepared(run)
    save(run)
    run.step()


def save_in_the_background(run):
    run.saver = mb.Checkpointer(run.directory, run.ddp, run.optimizer, asynchronous=True)
    run.saver.save(1)


def save_again_and_load(run):
    run.saver.save(2)
    run.step()
    run.saver.close()
    run.saver.load()


def detach(run):
    run.ddp.detach()


def wrap_again(run):
    run.module(torch.ones(1, 4, dtype=run.module.shift.dtype)).sum().backward()
    run.module.zero_grad()
    prepared(run, steps=1)


def broadcast(run):
    run.ddp.broadcast_params()


def check(run):
    run.ddp.check_replicas()


def sync_params(run):
    run.ddp.start_param_sync()
    run.ddp.finish_param_sync()


def reload(run):
    run.optimizer.reload_main_params()


def unfreeze(run):
    prepared(run)
    run.module.frozen.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.module.frozen.parameters()), "lr": 0.02})


def add_group(run):
    run.module.frozen.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.module.frozen.parameters()), "lr": 0.02})


def rebuild(run):
    run.ddp.rebuild()


def average(run):
    run.ema = mb.ShardedEMA(run.optimizer, decay=0.5)
    run.ema.update()
    run.ema.update()


def without_average(run):
    without_state(run)
    finish_step(run)


def measure_norms(run):
    with mb.param_norms(run.optimizer) as norms:
        run.optimizer.step()
    assert all(norm.update > 0 for norm in norms.values())
    run.optimizer.zero_grad()


def unscale_and_clip(run):
    run.optimizer.unscale_grads(0.5)
    run.optimizer.clip_grad_norm_(0.1)


def scale_with_torch(run):
    with_gradients(run)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    run.scaler.scale(torch.ones(()))  # makes its own tensors


def step_with_own_scaler(run):
    run.scaler = mb.DynamicGradScaler(8.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()


def chain(run):
    run.chain = mb.ChainedOptimizer([run.optimizer], clip_grad=1.0)
    run.chain.step()
    run.chain.zero_grad()


def evaluate(run):
    run.module.eval()
    run.loss_of_evaluation = run.loss()
    run.module.train()


def zero_in_place(run):
    run.optimizer.zero_grad(set_to_none=False)


def add_by_hand(run):
    for param in run.ddp.param_names:
        param.main_grad.add_(1)


def finish_sync(run):
    run.ddp.start_grad_sync()
    run.ddp.finish_grad_sync()


def give_back_and_take(run):
    run.ddp.offload(params=True)
    run.ddp.onload()


def export_and_import(run):
    run.ddp.import_weights(list(run.ddp.export_weights(whole=True)))


def poll(run):
    run.stop = mb.AgreedStop(run.ddp)
    run.stop.poll()


def assign_gradients(run):
    with run.ddp.no_sync():
        run.backward()
    for param in run.ddp.param_names:
        param.grad = param.grad.clone()


def backward_and_finish(run):
    run.backward()
    finish_step(run)


def first_step(run):
    run.optimizer.step()


def clear(run):
    run.optimizer.zero_grad()


def without_state(run):
    run.wrap()
    run.own()
    run.backward()


def graph(run):
    prepared(run)
    run.kept = run.loss()


def first_graph(run):
    run.wrap()
    run.own()
    run.kept = run.loss()


def backward(run):
    run.kept.backward()


def finish_only(run):
    run.ddp.finish_grad_sync()


def microbatch(run):
    run.wrap()
    run.own()
    with run.ddp.no_sync():
        run.backward()


def finalize(run):
    mb.finalize_grads(run.ddp)


def scale(run):
    finish_sync(run)
    run.ddp.scale_gradients(0.5)


def assigned(run):
    prepared(run)
    assign_gradients(run)


def scale_early(run):
    run.ddp.scale_gradients(0.5)


def unscale_with_torch(run):
    run.scaler.unscale_(run.optimizer)


def step_with_torch(run):
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()


def zero_buffers(run):
    run.ddp.zero_grad_buffer()


def add_by_hand_and_finish(run):
    add_by_hand(run)
    backward_and_finish(run)


def move_on_and_load(run):
    run.step()
    load(run)


def ask(run):
    assert mb.can_load(run.directory, run.ddp, run.optimizer) == []


CALLS = {
    "DistributedDataParallel()": (nothing, Run.wrap, Run.own),
    "DistributedOptimizer()": (Run.wrap, Run.own, nothing),
    "the first step()": (without_state, first_step, clear),
    "step()": (with_gradients, finish_step, nothing),
    "backward()": (graph, backward, finish_step),
    "the first backward()": (first_graph, backward, finish_step),
    "the first finish_grad_sync()": (microbatch, finish_only, finish_step),
    "an evaluation": (prepared, evaluate, nothing),
    "start_grad_sync(), finish_grad_sync()": (with_gradients, finish_sync, finish_step),
    "finalize_grads()": (with_gradients, finalize, finish_step),
    "scale_gradients()": (with_gradients, scale, finish_step),
    "scale_gradients() of assigned ones": (assigned, scale_early, backward_and_finish),
    "unscale_grads(), clip_grad_norm_()": (with_gradients, unscale_and_clip, finish_step),
    "GradScaler.unscale_()": (scale_with_torch, unscale_with_torch, step_with_torch),
    "DynamicGradScaler": (with_gradients, step_with_own_scaler, nothing),
    "zero_grad(set_to_none=False)": (with_gradients, zero_in_place, backward_and_finish),
    "zero_grad_buffer()": (with_gradients, zero_buffers, add_by_hand_and_finish),
    "state_dict(), values()": (prepared, make_state, train_plainly_with_the_results),
    "load_state_dict()": (save_state, load_own_state, nothing),
    "load_state_dict() of the module": (prepared, load_weights, nothing),
    "save_checkpoint()": (prepared, save, move_on_and_load),
    "load_checkpoint()": (saved_and_moved_on, load, nothing),
    "can_load()": (saved_and_moved_on, ask, nothing),
    "Checkpointer.save() in the background": (prepared, save_in_the_background, save_again_and_load),
    "rebuild()": (prepared, rebuild, nothing),
    "add_param_group()": (prepared, add_group, rebuild),
    "rebuild() with a new group": (unfreeze, rebuild, nothing),
    "detach()": (prepared, detach, wrap_again),
    "broadcast_params()": (prepared, broadcast, nothing),
    "check_replicas()": (prepared, check, nothing),
    "offload(), onload()": (prepared, give_back_and_take, nothing),
    "export_weights(), import_weights()": (prepared, export_and_import, nothing),
    "start_param_sync(), finish_param_sync()": (prepared, sync_params, nothing),
    "the first ShardedEMA.update()": (without_average, average, nothing),
    "param_norms()": (with_gradients, measure_norms, nothing),
    "ChainedOptimizer": (with_gradients, chain, nothing),
    "the first step() of a ChainedOptimizer": (without_state, chain, nothing),
    "reload_main_params()": (prepared, reload, nothing),
    "AgreedStop.poll()": (prepared, poll, poll),
}


def in_mode_of_thread(run, call, mode):
    """Make the call, without the modes of the process."""
    with THREAD_MODES.get(mode, contextlib.nullcontext)():
        CALLS[call][1](run)


def go_on(run, call):
    """Use the results, train on, and return the bits of everything."""
    CALLS[call][2](run)
    for _ in range(2):
        run.step()
    return run.bits()
