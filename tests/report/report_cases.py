"""Configs and workloads that the tests of the report share."""

import random

from megabucket.config import DistributedDataParallelConfig
from megabucket.planning import RunConfig
from megabucket.planning.links import FlatLink, MeasuredLink, RingLink, TwoLevelLink
from megabucket.planning.setting import Setting
from megabucket.planning.workload import TensorWork, Workload
from megabucket.report import collect
from megabucket.trace import CollectiveKind

HOSTILE = '</script><img src=x onerror="pwned=1">&amp;\'\u2028\u2029<!--\n\t\x00\u202eevil 名前 🪣 @DATA@ @STYLE@ $& ${pwned=1}'

# Output 15.5.2: two large tensors first and 48 small ones after them, 1.2 ms of backward per million elements.
BOOK_MILLIONS = (30.0, 20.0, *(0.9, 0.6, 0.4, 0.3) * 12)


def tensors(*numels, backward_s=1e-3, forward_s=0.5e-3, name="layer.{}.weight"):
    return [
        {"name": name.format(index), "numel": numel, "backward_s": backward_s, "forward_s": forward_s}
        for index, numel in enumerate(numels)
    ]


def book(**sections):
    entries = [
        {"name": f"layer.{index}", "numel": int(millions * 1e6), "backward_s": 1.2e-3 * millions}
        for index, millions in enumerate(BOOK_MILLIONS)
    ]
    link = {"latency_s": 1.4e-3, "seconds_per_byte": 0.95e-9 / 4}
    return RunConfig.model_validate({"link": link, "workload": {"tensors": entries}, **sections})


def small(*numels, name="layer.{}.weight", **sections):
    defaults = {"link": {"kind": "ring", "latency_s": 1e-5, "bytes_per_s": 1e9}}
    return RunConfig.model_validate(
        {**defaults, "workload": {"tensors": tensors(*(numels or (1000, 300, 5000)), name=name)}, **sections}
    )


def zero(**sections):
    return small(
        **{
            "mode": "reduce_scatter",
            "ddp": {"overlap_param_gather": True, "bucket_size": 1000},
            "workload": {"tensors": tensors(1000, 300, 0, 5000, 128), "optimizer_s": 1e-3, "num_microbatches": 2},
            **sections,
        }
    )


def model_run(**sections):
    model = {
        "kind": "gpt",
        "vocab_size": 256,
        "sequence_length": 16,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "dtype": "bfloat16",
    }
    link = {"kind": "ring", "latency_s": 1e-6, "bytes_per_s": 1e9}
    workload = {"tokens_per_microbatch": 64, "flops_per_s": 1e9}
    return RunConfig.model_validate({"mode": "reduce_scatter", "model": model, "link": link, "workload": workload, **sections})


def report(run=None, *, dp_size=4, **arguments):
    return collect(run if run is not None else small(), dp_size=dp_size, **arguments)


# Random settings for the comparison of both simulators. Seeded, not drawn by hypothesis: hundreds go to the browser at once. #


def _seconds(rng):
    return rng.choice((0.0, 1.0, rng.uniform(0, 1), 10 ** rng.uniform(-9, 0)))


def _workload(rng):
    count = rng.randint(1, 12)
    numels = [rng.choice((0, 1, rng.randint(0, 9), rng.randint(0, 10**4), int(10 ** rng.uniform(0, 9)))) for _ in range(count)]
    return Workload(
        tuple(TensorWork(f"t{index}", numel, _seconds(rng), _seconds(rng)) for index, numel in enumerate(numels)),
        bytes_per_element=rng.choice((1, 2, 4, 8)),
        param_bytes_per_element=rng.choice((1, 2, 4, 8)),
        optimizer_s=_seconds(rng),
        num_microbatches=rng.randint(1, 3),
        ready_order=rng.choice((None, tuple(rng.sample(range(count), count)))),
    )


def _ring(rng):
    return RingLink(rng.choice((0.0, 10 ** rng.uniform(-7, -1))), 10 ** rng.uniform(3, 12))


def _link(rng, num_ranks):
    kind = rng.choice(("flat", "ring", "two levels", "measured"))
    if kind == "flat":
        return FlatLink(rng.choice((0.0, 10 ** rng.uniform(-7, -1))), rng.choice((0.0, 10 ** rng.uniform(-12, -6))))
    if kind == "ring":
        return _ring(rng)
    if kind == "two levels":
        return TwoLevelLink(_ring(rng), _ring(rng), rng.choice([n for n in (1, 2, 4) if num_ranks % n == 0]))
    tables = {}
    for operation in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER):
        sizes = sorted({rng.choice((rng.randint(0, 100), int(10 ** rng.uniform(0, 9)))) for _ in range(5)} | {2**31})
        tables[operation, rng.choice(("float32", "bfloat16"))] = tuple((size, _seconds(rng)) for size in sizes)
    return MeasuredLink(tables, num_ranks)


def random_settings(seed, count):
    """Settings of both modes with every kind of link, each with a bucket size."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        num_ranks = rng.choice((1, 2, 4, 64))
        is_sharded, overlaps = rng.random() < 0.5, rng.random() < 0.7
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=is_sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=is_sharded and overlaps and rng.random() < 0.7,
        )
        workload = _workload(rng)
        setting = Setting(workload, _link(rng, num_ranks), ddp, num_ranks)
        cases.append((setting, rng.choice((1, rng.randint(1, 20), int(10 ** rng.uniform(0, 10)), max(1, workload.numel // 3)))))
    return cases
