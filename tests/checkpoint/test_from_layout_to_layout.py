"""The theorem: state that goes from one layout into another and back is the same state, bit by bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in_memory import KeptInMemory

from megabucket import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megabucket.checkpoint.capture import TrainingParts, capture, to_host
from megabucket.checkpoint.restore import restore
from megabucket.testing import LoopbackWorld, param_specs

KINDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
}


class Model(torch.nn.Module):
    """The parameters of some specs, under their names."""

    def __init__(self, specs, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for spec in specs:
            home, _, name = spec.name.rpartition(".")
            module = self
            for part in home.split(".") if home else ():
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = dict(module.named_children())[part]
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            if len(spec.shape) == 4 and seed % 2:
                values = values.to(memory_format=torch.channels_last)
            module.register_parameter(name, torch.nn.Parameter(values.to(getattr(torch, spec.dtype))))

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(param.shape, generator=generator, dtype=torch.float64) for param in self.parameters()]
        return torch.stack(
            [(param.double() * factor).sum() for param, factor in zip(self.parameters(), factors, strict=True)]
        ).sum()


def rank_run(specs, layout, kind, seed, communicator):
    """One rank of a run in a layout."""
    sharded, bucket_size, _ = layout
    model = Model(specs, seed)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}] if len(params) > 1 else [{"params": params}]
    optimizer = KINDS[kind](groups)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=bucket_size)
    ddp = DistributedDataParallel(model, config, communicator=communicator)
    return TrainingParts(ddp, DistributedOptimizer(optimizer, ddp))


def captured(specs, layout, kind, *, seed, kept=None, steps=0):
    """A checkpoint of a run in a layout: of one that was restored, or of one that has trained."""
    world = LoopbackWorld(layout[2], timeout_s=20)

    def program(rank):
        parts = rank_run(specs, layout, kind, seed, world.communicator(rank))
        if kept is not None:
            restore(kept, parts)
        for step in range(steps):
            parts.ddp(step).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        return to_host(capture(parts, with_rng=False))

    return KeptInMemory(world.run(program))


LAYOUTS = st.tuples(st.booleans(), st.integers(1, 2_000) | st.none(), st.integers(1, 5))
MODELS = param_specs(max_params=6, max_numel=300, min_params=1, groups=("dense",), shared_embeddings=False)


@settings(max_examples=settings.default.max_examples * 3 // 10)  # each is three worlds that train or restore
@given(specs=MODELS, first=LAYOUTS, second=LAYOUTS, kind=st.sampled_from(sorted(KINDS)), steps=st.integers(0, 2))
def test_there_and_back_again_nothing_has_changed(specs, first, second, kind, steps):
    kept = captured(specs, first, kind, seed=1, steps=steps)

    there = captured(specs, second, kind, seed=2, kept=kept)
    back = captured(specs, first, kind, seed=3, kept=there)

    assert there.bits() == kept.bits()
    assert back.bits() == kept.bits()
    assert there.values == kept.values
    assert back.values == kept.values
