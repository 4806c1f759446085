"""docs/concepts/step-protocol.md lists every collective of a step and of a call, and what guards it: the list is what runs.

Programs in every mode are recorded: what each rank launches, and where its own code calls the library. Between two calls the
code of a rank may go another way than that of the others, so each call has to send the guard again before what it guards.
"""

import ast
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from grids import Grid, cut, of_expert

import megabucket as mb
from megabucket.comm import AllReduce
from megabucket.ddp.groups import ParallelGroups, ReductionGroup
from megabucket.errors import MegabucketError
from megabucket.layout.identity import plain_identity
from megabucket.testing import LoopbackWorld

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "step-protocol.md"
PACKAGES = ("buffer", "checkpoint", "comm", "ddp", "integrations", "optim", "weights")
OF_PROCESSES = {"same-host copies"}  # threads have no memory of their own
STEP = "a step"
NEW = "groups of a new wrapper"
SHARDED = {"use_distributed_optimizer": True}


# The page #


def table_of(heading):
    """The cells of the table whose first column has this heading."""
    _, _, rest = PAGE.read_text().partition(f"| {heading} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [re.split(r" *\| *", line)[1:-1] for line in lines]


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


class Row(NamedTuple):
    channel: str
    guard: str


class Behind(NamedTuple):
    gates: set
    control: set
    data: set


OF_STEP = {names_in(name)[0]: Row(channel, guard) for name, channel, _, guard in table_of("in a step")}
OF_CALL = defaultdict(lambda: Behind(set(), set(), set()))
for calls_of_row, *cells in table_of("call"):
    for call in names_in(calls_of_row) or [calls_of_row]:
        for names, cell in zip(OF_CALL[call], cells, strict=True):
            names.update(names_in(cell))
GATES = set().union(*(call.gates for call in OF_CALL.values()))


# What runs #


class Launch(NamedTuple):
    call: int
    """The number of the call of the rank's own code inside which it runs."""
    of: str
    channel: str
    name: str
    """As the page names it."""
    label: str
    is_gate: bool


def name_of(label):
    numbered = r"^(bucket|param gather|gradient gather|gradients to owners|values to shards) \d+"
    name = re.sub(numbered, r"\1 k", label.removesuffix(" length"))
    name = re.sub(r"^((?:saving|loading) a checkpoint): (?!writing).*", r"\1: P", name)
    name = re.sub(r"^unused parameters of \S+", "unused parameters of G", name)
    return re.sub(r"^gradients along .*", "gradients along X", re.sub(r"^.* texts$", "<gate> texts", name))


class Recording(LoopbackWorld):
    """A world that records, by rank, what is launched inside each call of the rank's own code."""

    def __init__(self, size, **fields):
        super().__init__(size, **fields)
        self.launches = [[] for _ in range(size)]
        self._calls = [(0, "") for _ in range(size)]

    def call(self, rank, of, function, *args, **kwargs):
        """Call the library on one rank, as a step or by the name of a call."""
        self._calls[rank] = (self._calls[rank][0] + 1, of)
        return function(*args, **kwargs)

    def _launch(self, rank, channel, calls, label):
        if label != "tensor parallel":  # the model's own
            on_control = not channel.compares_labels
            is_length = label.endswith(" length")
            is_gate = on_control and isinstance(calls[0], AllReduce) and not is_length and name_of(label) in GATES
            kind = "control" if on_control else "data"
            self.launches[rank].append(Launch(*self._calls[rank], kind, name_of(label), label, is_gate))
        return super()._launch(rank, channel, calls, label)


class Model(torch.nn.Module):
    """Weights whose gradients are the input: a row that is cut over tensor-parallel ranks, a bias, an expert, a norm."""

    def __init__(self, *, tp=False, experts=False):
        super().__init__()
        self.row, self.bias = torch.nn.Parameter(torch.ones(8, 8)), torch.nn.Parameter(torch.ones(8))
        self.expert, self.norm = torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(2))
        if tp:
            cut(self.row, 1)
            self.norm.sequence_parallel = True
        if experts:
            of_expert(self.expert)

    def forward(self, x):
        return sum(param.sum() for param in self.parameters()) * x


class Api:
    """The library as the program of one rank calls it.

    ``ranks`` are the arguments that tell a wrapper its ranks, ``model`` those of the model.
    """

    def __init__(self, world, rank, ranks, **model):
        self.world, self.rank = world, rank
        self._ranks, self._model = ranks, model

    def __call__(self, of, function, *args, **kwargs):
        return self.world.call(self.rank, of, function, *args, **kwargs)

    def wrap(self, **config):
        config = mb.DistributedDataParallelConfig(**{"bucket_size": 40, **config})
        return self("DistributedDataParallel()", mb.DistributedDataParallel, Model(**self._model), config, **self._ranks)

    def own(self, ddp, *, kind=torch.optim.SGD, **fields):
        return self("DistributedOptimizer()", mb.DistributedOptimizer, kind(ddp.parameters(), lr=0.1), ddp, **fields)

    def backward(self, ddp, x=1.0):
        loss = self(STEP, ddp, x)
        self(STEP, loss.backward)

    def step(self, ddp, optimizer, x=1.0):
        self.backward(ddp, x)
        result = self(STEP, optimizer.step)
        self(STEP, optimizer.zero_grad)
        return result


# Worlds: each with a function of the rank #


def alike():
    world = Recording(2, timeout_s=20)
    return world, lambda rank: Api(world, rank, {"communicator": world.communicator(rank)})


def replicas():
    world = Recording(4, timeout_s=20)
    everybody = [world.communicator(rank) for rank in range(4)]
    inside = world.subgroup([0, 1]) | world.subgroup([2, 3])
    over = world.subgroup([0, 2]) | world.subgroup([1, 3])

    def api(rank):
        dense = ReductionGroup(inside[rank], over[rank])
        return Api(world, rank, {"groups": ParallelGroups({"dense": dense}, step_group=everybody[rank])})

    return world, api


def experts():
    grid = Grid(1, 4, ep=2, make_world=Recording)

    def api(rank):
        def identity(name, param):
            return replace(plain_identity(f"{name} {rank % 2}", param.shape), group="expert") if name == "expert" else None

        return Api(grid.world, rank, {"groups": grid.groups(rank, copies=[], identity=identity)}, experts=True)

    return grid.world, api


def tensor_parallel(**more):
    """The norm covers all four ranks."""
    grid = Grid(2, 2, make_world=Recording)

    def api(rank):
        groups = grid.groups(rank, reduction=["dense"], copies=["tp"])
        copies = {**groups.copies, **{name: grid.of(rank, line) for name, line in more.items()}}
        return Api(grid.world, rank, {"groups": replace(groups, copies=copies)}, tp=True)

    return grid.world, api


def pipeline():
    return tensor_parallel(pp="tp")


# Programs: each is run on every rank #


class TrainEval(torch.optim.SGD):
    """As schedule-free optimizers: weights are switched between training and evaluation."""

    update_kind = "elementwise"

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self):
        self.param_groups[0]["train_mode"] = True

    def eval(self):
        self.param_groups[0]["train_mode"] = False


class OfWholeParameters(TrainEval):
    """Each parameter has an owner."""

    update_kind = "tensor"


def steps(api, _, **config):
    ddp = api.wrap(**config)
    optimizer = api.own(ddp, clip_grad=1.0, returns_num_zeros=True)
    for _ in range(2):
        with ddp.no_sync():
            api.backward(ddp)
        assert api.step(ddp, optimizer).updated
    api(STEP, ddp.finish_param_sync)


def by_hand(api, _, **config):
    ddp = api.wrap(**config, nonfinite_gradients="allow")
    optimizer = api.own(ddp)
    for _ in range(2):
        api.backward(ddp)
        api(STEP, optimizer.unscale_grads, 0.5)
        api(STEP, optimizer.clip_grad_norm_, 1.0)
        assert api(STEP, optimizer.step).updated
        api(STEP, optimizer.zero_grad)
    for force in (False, True):
        api.backward(ddp)
        api(STEP, ddp.start_grad_sync)
        api(STEP, ddp.finish_grad_sync, force_all_reduce=force)
        api(STEP, optimizer.step)
        api(STEP, optimizer.zero_grad)
    api.backward(ddp)
    api(STEP, ddp.finish_grad_sync)
    api(STEP, ddp.zero_grad)


def torch_scaler(api, _, **config):
    ddp = api.wrap(**config, nonfinite_gradients="allow")
    optimizer = api.own(ddp, clip_grad=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for x in (1.0, float("inf"), 1.0):
        loss = api(STEP, ddp, x)
        api(STEP, scaler.scale(loss).backward)
        api(STEP, scaler.step, optimizer)
        scaler.update()
        api(STEP, optimizer.zero_grad)


def finalized(api, _, **config):
    ddp = api.wrap(**config, grad_reduction="sum")
    optimizer = api.own(ddp, clip_grad=1.0)
    for _ in range(2):
        api.backward(ddp)
        api("finalize_grads()", mb.finalize_grads, ddp, num_tokens=8)
        assert api(STEP, optimizer.step).updated
        api(STEP, optimizer.zero_grad)


def chained(api, _, **config):
    parts = [api.wrap(**config) for _ in range(2)]
    optimizers = [api.own(ddp, returns_num_zeros=True) for ddp in parts]
    chain = api("ChainedOptimizer()", mb.ChainedOptimizer, optimizers, clip_grad=1.0)
    for _ in range(2):
        for ddp in parts:
            api.backward(ddp)
        assert api(STEP, chain.step).updated
        api(STEP, chain.zero_grad)


def calls(api, directory, **config):
    ddp = api.wrap(**config)
    optimizer = api.own(ddp, kind=torch.optim.AdamW)
    api.step(ddp, optimizer)
    saved = api("state_dict()", optimizer.state_dict)
    api("load_state_dict()", optimizer.load_state_dict, saved)
    api("check_replicas()", ddp.check_replicas)
    api("broadcast_params()", ddp.broadcast_params)
    chunks = api("export_weights()", lambda: list(ddp.export_weights(whole=True)))
    api("import_weights()", ddp.import_weights, chunks)
    api("start_param_sync()", ddp.start_param_sync)
    api("rebuild()", ddp.rebuild)
    measured = mb.param_norms(optimizer)
    measured.__enter__()
    api.step(ddp, optimizer)
    api("param_norms()", measured.__exit__, None, None, None)
    api("save_checkpoint()", mb.save_checkpoint, directory / "one", ddp, optimizer, step=1)
    api("load_checkpoint()", mb.load_checkpoint, directory / "one", ddp, optimizer)
    saver = mb.Checkpointer(directory / "many", ddp, optimizer, asynchronous=True)
    api("Checkpointer", saver.save, 1)
    api("Checkpointer", saver.poll)
    api("Checkpointer", saver.close)
    api("Checkpointer", saver.load)


def switched(api, _, **config):
    ddp = api.wrap(**config)
    optimizer = api.own(ddp, kind=TrainEval)
    for _ in range(2):
        api("train()", optimizer.train)
        api.step(ddp, optimizer)
        api("eval()", optimizer.eval)


def owned(api, directory, **config):
    ddp = api.wrap(**config)
    optimizer = api.own(ddp, kind=OfWholeParameters, clip_grad=1.0)
    for _ in range(2):
        api("train()", optimizer.train)
        assert api.step(ddp, optimizer).updated
        api("eval()", optimizer.eval)
    saved = api("state_dict()", optimizer.state_dict)
    api("load_state_dict()", optimizer.load_state_dict, saved)
    api("rebuild()", ddp.rebuild)
    api("save_checkpoint()", mb.save_checkpoint, directory / "one", ddp, optimizer, step=1)
    api("load_checkpoint()", mb.load_checkpoint, directory / "one", ddp, optimizer)


def polled(api, _, **config):
    ddp = api.wrap(**config)
    optimizer, stop = api.own(ddp), mb.AgreedStop(ddp)
    api.step(ddp, optimizer)
    if api.rank == 1:
        stop.request()
    assert api("AgreedStop.poll()", stop.poll)


def faults(api, _, **config):
    """On rank 1: a nan, an exception in a block, a step that is cleared, another call, other settings, other weights."""
    ddp = api.wrap(**config)
    optimizer = api.own(ddp)
    is_odd = api.rank == 1
    raised = []

    def attempt(*call, **fields):
        try:
            api(*call, **fields)
        except (MegabucketError, ValueError) as error:
            raised.append(type(error).__name__)

    def fails():
        with ddp.step():
            if is_odd:
                raise ValueError("no batch")
            ddp(1.0).backward()
            optimizer.step()

    def step(x=1.0):
        ddp(x).backward()
        optimizer.step()

    attempt(STEP, step, float("nan") if is_odd else 1.0)
    attempt(STEP, optimizer.zero_grad)
    attempt(STEP, fails)
    attempt(STEP, optimizer.zero_grad)
    attempt(*(("state_dict()", optimizer.state_dict) if is_odd else ("check_replicas()", ddp.check_replicas)))
    attempt(*(("broadcast_params()", ddp.broadcast_params) if is_odd else (STEP, step)))
    attempt(STEP, optimizer.zero_grad)
    attempt("load_state_dict()", optimizer.load_state_dict, {})
    ddp.module.shift = torch.zeros(3 if is_odd else 2)
    attempt("broadcast_params()", ddp.broadcast_params)
    ddp.module.shift = torch.zeros(2)
    with torch.no_grad():
        ddp.module.bias.add_(float(is_odd))
    attempt("check_replicas()", ddp.check_replicas)
    assert len(raised) == 7, raised


RUNS = {
    "steps, all-reduce": (alike, steps, {}),
    "steps, no overlap": (alike, steps, {"overlap_grad_reduce": False}),
    "steps, reduce-scatter": (alike, steps, SHARDED),
    "steps, gather in forward": (alike, steps, {**SHARDED, "overlap_param_gather": True}),
    "steps, replicas": (replicas, steps, SHARDED),
    "steps, experts": (experts, steps, {}),
    "steps, experts with shards": (experts, steps, SHARDED),
    "steps, norm over ranks": (tensor_parallel, steps, {}),
    "steps, tensor parallel with shards": (tensor_parallel, steps, SHARDED),
    "steps, unused skipped": (alike, steps, {"unused_parameters": "skip"}),
    "steps, unused skipped, replicas": (replicas, steps, {**SHARDED, "unused_parameters": "skip"}),
    "steps, no fence": (alike, steps, {**SHARDED, "fence": False}),
    "by hand, all-reduce": (alike, by_hand, {}),
    "by hand, reduce-scatter": (alike, by_hand, SHARDED),
    "by hand, norm over ranks": (tensor_parallel, by_hand, {}),
    "by hand, replicas": (replicas, by_hand, SHARDED),
    "scaler, reduce-scatter": (alike, torch_scaler, SHARDED),
    "scaler, norm over ranks": (tensor_parallel, torch_scaler, {}),
    "finalized, all-reduce": (pipeline, finalized, {"finish": "explicit"}),
    "finalized, reduce-scatter": (tensor_parallel, finalized, SHARDED),
    "chained, reduce-scatter": (alike, chained, SHARDED),
    "chained, norm over ranks": (tensor_parallel, chained, {}),
    "calls, all-reduce": (alike, calls, {}),
    "calls, reduce-scatter": (alike, calls, SHARDED),
    "calls, experts": (experts, calls, SHARDED),
    "calls, no fence": (alike, calls, {**SHARDED, "fence": False}),
    "switched, reduce-scatter": (alike, switched, SHARDED),
    "owned, reduce-scatter": (alike, owned, SHARDED),
    "owned, replicas": (replicas, owned, {**SHARDED, "overlap_param_gather": True}),
    "polled, no fence": (alike, polled, {"fence": False}),
    "faults, all-reduce": (alike, faults, {}),
    "faults, reduce-scatter": (alike, faults, SHARDED),
    "faults, unused skipped": (experts, faults, {**SHARDED, "unused_parameters": "skip"}),
    "faults, norm over ranks": (tensor_parallel, faults, {}),
    "faults, experts with shards": (experts, faults, SHARDED),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """By run, what each rank has launched."""
    found = {}
    for name, (make, program, config) in RUNS.items():
        world, api = make()
        directory = tmp_path_factory.mktemp("run")
        world.run(lambda rank: program(api(rank), directory, **config))  # noqa: B023
        found[name] = world.launches
    return found


# The list is what runs #


def is_listed(launch):
    behind = OF_CALL[launch.of]
    if launch.is_gate:
        return launch.name in behind.gates
    own = OF_STEP.get(launch.name)
    of_new = OF_CALL[NEW].control if launch.of == "DistributedDataParallel()" else set()
    here = (behind.control | of_new) if launch.channel == "control" else behind.data
    return launch.name in here or (own is not None and own.channel == launch.channel)


def test_every_collective_is_in_the_list_with_its_call_and_channel(recorded):
    launches = {launch for ranks in recorded.values() for rank in ranks for launch in rank}

    assert sorted({launch[1:4] for launch in launches if not is_listed(launch)}) == []


def test_every_entry_of_the_list_is_seen(recorded):
    launches = {launch for ranks in recorded.values() for rank in ranks for launch in rank}
    of_calls = {(launch.of, launch.is_gate, launch.name) for launch in launches}
    listed = {name for _, *cells in table_of("call") for cell in cells for name in names_in(cell)} | OF_STEP.keys()

    assert listed - {launch.name for launch in launches} == OF_PROCESSES
    for calls_in_row, *cells in table_of("call"):
        names = ["DistributedDataParallel()"] if calls_in_row == NEW else names_in(calls_in_row)
        for column, cell in enumerate(cells):
            for name in {*names_in(cell)} - OF_PROCESSES:
                assert any((call, column == 0, name) in of_calls for call in names), (names, name)


GUARDS = {"the fence": {"the fence"}, "the fence or the gate": {"the fence", "the gate"}, "the gate": {"the gate"}}
AFTER, BEFORE = "the fence behind it", "its bucket"


def guards_of(launch):
    """What has to run before a launch in the same call: one of these; empty if nothing has to."""
    if launch.is_gate or launch.name == "fence" or launch.name in OF_CALL[NEW].control:
        return set()
    if launch.name in OF_CALL[launch.of].control | OF_CALL[launch.of].data:
        return {"the gate"}
    guard = OF_STEP[launch.name].guard
    return set() if guard.startswith((AFTER, BEFORE)) else GUARDS[guard]


def unguarded(launches, *, has_fence):
    """The launches of a rank that run before their guard. Between two calls the rank's own code runs."""
    found = []
    for _, of_call in groupby(launches, key=lambda launch: launch.call):
        seen = set()
        for launch in of_call:
            guards = guards_of(launch) - (set() if has_fence else {"the fence"})
            if guards and seen.isdisjoint(guards):
                found.append(launch)
            seen |= {"the gate"} if launch.is_gate else {"the fence"} if launch.name == "fence" else set()
    return found


def used_too_early(launches):
    """The buckets of a rank without a fence, or the report of a drop, between them and the next collective on data."""
    found, is_settled = [], False
    reported = {launch.call for launch in launches if launch.name == "step report"}
    for launch in reversed(launches):
        is_bucket = launch.name in OF_STEP and OF_STEP[launch.name].guard.startswith((AFTER, BEFORE))
        if launch.name == "fence":
            is_settled = True
        elif launch.name in ("bucket k", "unused parameters of G") and not is_settled and launch.call not in reported:
            found.append(launch)
        elif launch.channel == "data" and not is_bucket:
            is_settled = False
    return found


def over_replicas_too_early(launches):
    """The reductions over replicas of a rank that run before those inside its replica."""
    found, num_sent = [], Counter()
    for launch in launches:
        num_sent[launch.label] += 1
        inside = launch.label.removesuffix(" over replicas")
        if launch.name == "bucket k over replicas" and num_sent[launch.label] > num_sent[inside]:
            found.append(launch)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_no_collective_runs_without_its_guard_in_the_same_call(run, recorded):
    has_fence = RUNS[run][2].get("fence", True)

    for launches in recorded[run]:
        assert unguarded(launches, has_fence=has_fence) == []
        assert over_replicas_too_early(launches) == []
        if has_fence:
            assert used_too_early(launches) == []


def test_the_check_finds_a_norm_without_a_second_fence(recorded):
    launches = recorded["by hand, norm over ranks"][0]
    fences = [launch for launch in launches if launch.name == "fence"]
    norms = [launch for launch in launches if launch.name == "grad norm"]
    of_first_norm = next(one for one in fences if one.call == norms[0].call)

    assert unguarded([one for one in launches if one is not of_first_norm], has_fence=True) == [norms[0]]


def test_the_check_finds_buckets_of_a_chain_without_their_fence(recorded):
    launches = recorded["chained, reduce-scatter"][0]
    last = max(position for position, launch in enumerate(launches) if launch.name == "bucket k")
    fence = next(position for position in range(last, len(launches)) if launches[position].name == "fence")
    of_all_parts = [launches[position] for position in (fence, fence + 1)]
    assert [launch.name for launch in of_all_parts] == ["fence", "fence"]

    assert used_too_early(launches[:fence] + launches[fence + 2 :])


def labels_in(path):
    """The labels that a file gives to collectives and gates, where they begin with their text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            labels = [word.value for word in node.keywords if word.arg == "label"]
            if called in ("call", "_call"):
                labels += node.args[:1]
            for label in labels if called in ("launch", "handle", "exchange", "Exchange", "send", "call", "_call") else ():
                parts = label.values if isinstance(label, ast.JoinedStr) else [label]
                if isinstance(parts[0], ast.Constant):
                    yield "".join(str(getattr(part, "value", 0)) if isinstance(part, ast.Constant) else "0" for part in parts)


def test_the_list_has_every_label_in_the_code():
    """Also of a collective that no program here reaches."""
    paths = [path for package in PACKAGES for path in (ROOT / "megabucket" / package).rglob("*.py")]
    labels = {label for path in paths for label in labels_in(path)}
    listed = OF_STEP.keys() | GATES.union(*(call.control | call.data for call in OF_CALL.values()))

    assert {name_of(label) for label in labels} <= listed
    assert len(labels) > 30
