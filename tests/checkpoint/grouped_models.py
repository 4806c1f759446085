"""A model that tensor or expert parallelism cuts, on the ranks of a loopback world.

The gradient of each element is a number that follows from its place in the whole model and the step, whatever the ranks: few
bits, so that sums over any ranks are exact. So a run on any ranks is bit by bit that of one process of plain torch.
"""

import torch

import megabucket as mb
from megabucket.layout import ParamIdentity
from megabucket.testing import LoopbackWorld

NUM_EXPERTS = 4
SHAPES = {"embedding.weight": (8, 6), "norm.weight": (6,), "head.weight": (4, 2, 3, 3), "scale": ()}
CUT_ALONG = {"embedding.weight": 1, "head.weight": 0}
"""What tensor parallelism cuts, along which dimension; it copies the rest."""
EXPERT_SHAPES = {"up.weight": (5, 6), "up.bias": (5,)}
STACKED = "stacked.weight"  # one tensor of all experts, cut along its first dimension
STACKED_SHAPE = (NUM_EXPERTS, 3, 4)


def values_of(name, shape, seed):
    """Values of a whole tensor that follow from its name."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)) * 1_000)
    return torch.randint(-8, 9, shape, generator=generator) / 8


def whole_shapes():
    """The shapes of the whole model by global name."""
    experts = {f"experts.{e}.{name}": shape for e in range(NUM_EXPERTS) for name, shape in EXPERT_SHAPES.items()}
    return {**SHAPES, **experts, STACKED: STACKED_SHAPE}


class Place:
    """Where a rank is in a grid of tensor- or expert-parallel ranks: which part of each parameter it holds.

    Args:
        ep: over how many ranks experts are spread; None: there are none.
    """

    def __init__(self, rank, size, *, tp=1, ep=None):
        self.rank, self.size, self.tp, self.ep = rank, size, tp, ep or 1
        self.tp_rank = rank % tp
        self.shapes = SHAPES if ep is None else {**SHAPES, STACKED: STACKED_SHAPE}
        per_rank = 0 if ep is None else NUM_EXPERTS // ep
        self.experts = range(rank % self.ep * per_rank, (rank % self.ep + 1) * per_rank)
        cut = {name: (dim, self.tp_rank, tp) for name, dim in CUT_ALONG.items()}
        self.cut = {**cut, STACKED: (0, rank % self.ep, self.ep)}

    def ranks_of(self, kind):
        """Which ranks of the world are in this rank's group: dense, tp or expert."""
        if kind == "tp":
            return tuple(range(self.rank - self.tp_rank, self.rank - self.tp_rank + self.tp))
        step = self.tp if kind == "dense" else self.ep
        return tuple(range(self.rank % step, self.size, step))

    def identity(self, name, param):
        """The identity of a local parameter."""
        if name.startswith("local_experts."):
            _, index, rest = name.split(".", 2)
            shape = tuple(param.shape)
            return ParamIdentity(f"experts.{self.experts[int(index)]}.{rest}", shape, (0,) * len(shape), group="expert")
        whole, offset = whole_shapes()[name], [0] * param.dim()
        if name in self.cut:
            dim, index, _ = self.cut[name]
            offset[dim] = index * param.shape[dim]
        copies = ("tp",) if self.tp > 1 and name not in self.cut else ()
        return ParamIdentity(name, whole, tuple(offset), "expert" if name == STACKED else "dense", copies)

    def part(self, identity, shape, whole):
        """The part of a whole tensor that is here."""
        return whole[tuple(slice(a, a + b) for a, b in zip(identity.offset, shape, strict=True))]


class Expert(torch.nn.Module):
    """An expert with a buffer and extra state, which show whose they are and how many steps they have seen."""

    def __init__(self, number, seed):
        super().__init__()
        self.register_buffer("seen", torch.tensor([number, seed], dtype=torch.float64))
        self.history = torch.tensor([number, seed])

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]

    def count(self):
        self.seen += 1
        self.history = self.history + torch.tensor([0, 1])


class Model(torch.nn.Module):
    """The part of the whole model that is at one place, under local names that repeat."""

    def __init__(self, place, *, seed=0, dtype=torch.float32, channels_last=False):
        super().__init__()
        self.place = place
        self.local_experts = torch.nn.ModuleList()
        for number in place.experts:
            expert = Expert(number, seed)
            for name in EXPERT_SHAPES:
                self._register(expert, name, whole_shapes()[f"experts.{number}.{name}"])
            self.local_experts.append(expert)
        for name, shape in place.shapes.items():
            dim, _, parts = place.cut.get(name, (0, 0, 1))
            self._register(self, name, [size // parts if d == dim else size for d, size in enumerate(shape)])
        self.register_buffer("steps", torch.tensor(0))
        with torch.no_grad():
            for name, param in self.named_parameters():
                own = place.identity(name, param)
                param.copy_(place.part(own, param.shape, values_of(own.global_name, own.global_shape, seed)))
        self.to(dtype)
        if channels_last:
            self.get_submodule("head").to(memory_format=torch.channels_last)

    @staticmethod
    def _register(module, name, shape):
        home, _, leaf = name.rpartition(".")
        if home:
            if home not in dict(module.named_children()):
                module.add_module(home, torch.nn.Module())
            module = module.get_submodule(home)
        module.register_parameter(leaf, torch.nn.Parameter(torch.empty(shape)))

    def forward(self, step):
        """A loss whose gradient is the same numbers on any ranks."""
        self.steps += 1
        for expert in self.local_experts:
            expert.count()
        terms = []
        for name, param in self.named_parameters():
            own = self.place.identity(name, param)
            factors = self.place.part(own, param.shape, values_of(own.global_name, own.global_shape, 100 + step))
            # An expert's gradient is summed over fewer ranks than it is divided by, as if it had got the tokens of all.
            share = self.place.ep if own.group == "expert" else 1
            terms.append((param.float() * factors * share).sum())
        return torch.stack(terms).sum()


def adamw(model):
    """Two groups: matrices decay."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1 / 64)


class Run:
    """One rank's run on some ranks.

    Args:
        groups: of the wrapper.
    """

    def __init__(self, place, groups, *, sharded, seed=0, dtype=torch.float32, bucket_size=40, clip=0.0, **model):
        self.place = place
        self.model = Model(place, seed=seed, dtype=dtype, **model)
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, bucket_size=bucket_size, grad_reduce_in_fp32=True
        )
        self.ddp = mb.DistributedDataParallel(self.model, config, groups=groups)
        self.optimizer = mb.DistributedOptimizer(adamw(self.model), self.ddp, clip_grad=clip)
        self.rank = place.rank

    def train(self, steps):
        """Train the steps of these numbers."""
        for step in steps:
            self.ddp(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, root, step, **more):
        """Save."""
        return mb.save_checkpoint(root, self.ddp, self.optimizer, step=step, data_position=step, keep_last=None, **more)

    def load(self, root, **more):
        """Load."""
        return mb.load_checkpoint(root, self.ddp, self.optimizer, **more)

    def differences(self, steps, dtype=torch.float32):
        """Names of the parameters whose values, or moments, are not those of one process of plain torch after some steps."""
        plain = self.alone(steps, dtype)
        found = []
        state = self.optimizer.state_dict()["state"]
        members = self.optimizer.sharding.by_group()
        names = {param: name for name, param in self.model.named_parameters()}
        for index, param in enumerate(param for group in members for param in group):
            own = self.place.identity(names[param], param)
            whole, moments = plain[own.global_name]
            pairs = [(param.detach(), whole.to(param.dtype)), *((state[index][key], moments[key]) for key in moments)]
            pairs = [(a, self.place.part(own, param.shape, b) if b.dim() else b) for a, b in pairs]
            if not all(torch.equal(a, b) for a, b in pairs):
                found.append(own.global_name)
        return found

    def alone(self, steps, dtype):
        """Values and moments of the same parameters after some steps of one process."""
        everything = Place(0, 1, ep=1 if self.place.experts else None)
        model = Model(everything, dtype=dtype).float()
        optimizer = adamw(model)
        for step in range(steps):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {}
        for name, param in model.named_parameters():
            found[everything.identity(name, param).global_name] = param.detach(), optimizer.state.get(param, {})
        return found


def run_ranks(size, program, *, tp=1, ep=None, **settings):
    """Call ``program(run)`` on every rank of a loopback world, one thread each; return the results."""
    world = LoopbackWorld(size, timeout_s=20)
    places = [Place(rank, size, tp=tp, ep=ep) for rank in range(size)]
    kinds = ("dense", *(["tp"] if tp > 1 else []), *(["expert"] if ep is not None else []))
    worldwide = tuple(range(size))
    wanted = {place.ranks_of(kind) for place in places for kind in kinds} - {worldwide}
    made = {ranks: world.subgroup(ranks) for ranks in sorted(wanted)}

    def wrapped(rank):
        whole = world.communicator(rank)
        of = {kind: places[rank].ranks_of(kind) for kind in kinds}
        found = {kind: whole if ranks == worldwide else made[ranks][rank] for kind, ranks in of.items()}
        copies = {"tp": found.pop("tp")} if tp > 1 else {}
        groups = mb.ParallelGroups(found, identity=places[rank].identity, copies=copies, norm_group=whole)
        return program(Run(places[rank], groups, **settings))

    return world.run(wrapped)
