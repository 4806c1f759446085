"""Gradients that say which ranks are in them, through real wrappers and real optimizer steps.

Each rank's gradients are its ``contribution`` to a known sum. The reduced ones are compared with it bit by bit in the buffers,
then the parameters after an update are, and differences are decoded into the ranks that are missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.doctor.collectives import Problem, contribution, name_of, read_sum, whole_sum
from megabucket.doctor.question import Answer, Asking, Bench, Question, merge
from megabucket.doctor.report import Verdict
from megabucket.errors import name_list
from megabucket.layout.shards import shard_slices
from megabucket.optim import DistributedOptimizer

_MICROBATCHES: Final = (1, 2)
"""Of each step. The second step must not see the first one's gradients."""
_BUCKET_SIZE: Final = 40
"""Elements: several buckets of each buffer, of one or two parameters."""
_MOST_BUCKETS: Final = 4
"""That a small model can be cut into."""
_REDUCTIONS: Final[dict[str, dict[str, Any]]] = {
    "mean": {"grad_reduction": "mean", "average_in_collective": False, "grad_reduce_in_fp32": True},
    "mean by AVG": {"grad_reduction": "mean", "average_in_collective": True, "grad_reduce_in_fp32": True},
    "mean in 16 bits": {"grad_reduction": "mean", "average_in_collective": False, "grad_reduce_in_fp32": False},
    "sum": {"grad_reduction": "sum", "average_in_collective": False, "grad_reduce_in_fp32": True},
}


def paths(config: DistributedDataParallelConfig) -> dict[str, DistributedDataParallelConfig]:
    """Return the configured path, then all others by name: mode x overlap x grouping x reduction, with several buckets.

    What none of the four says stays as configured.
    """
    fields = config.model_dump()
    # A large model's number of buckets may be more than the small one has elements.
    num_buckets = None if config.num_buckets is None else min(config.num_buckets, _MOST_BUCKETS)
    found = {"as configured": DistributedDataParallelConfig(**{**fields, "num_buckets": num_buckets})}
    cut = {"bucket_size": _BUCKET_SIZE, "bucket_cap_mb": None, "num_buckets": None, "overlap_param_gather": False}
    modes = {"all-reduce": False, "reduce-scatter": True}
    overlaps = {"overlap": True, "no overlap": False}
    groupings = {"each bucket": "per_bucket", "one batch": "single"}
    for mode, overlap, grouping, reduction in product(modes, overlaps, groupings, _REDUCTIONS):
        changes = {
            **cut,
            "use_distributed_optimizer": modes[mode],
            "overlap_grad_reduce": overlaps[overlap],
            "bucket_groups": groupings[grouping],
            **_REDUCTIONS[reduction],
        }
        found[f"{mode}, {overlap}, {grouping}, {reduction}"] = DistributedDataParallelConfig(**{**fields, **changes})
    return found


def gradient_questions(config: DistributedDataParallelConfig) -> Iterator[Question]:
    """Return one question a path: whether gradients and updates are right."""
    for index, (name, path) in enumerate(paths(config).items()):
        is_configured = index == 0
        averages = path.average_in_collective
        yield Question(
            "gradients",
            name,
            partial(path_is_right, config=path, is_configured=is_configured),
            refusal=f"a wrapper with these settings does not work here{'; it needs AVG' if averages else ''}",
            is_required=is_configured or not averages,
        )


def path_is_right(bench: Bench, config: DistributedDataParallelConfig, *, is_configured: bool) -> Asking:
    """Ask whether gradients, updates and gathered parameters are right in two steps of a small model."""
    model = _Model(bench)
    ranks: dict[str, Any] = {"communicator": bench.communicator}
    if is_configured and bench.group is not None:
        # As in training: the wrapper makes a communicator of its own, with heartbeats. One for each path would be 33 threads
        # with a connection to the store each.
        ranks = {"process_group": bench.group}
    ddp = DistributedDataParallel(model, config, **ranks)
    try:
        differences = list(_differences(ddp, model, bench))
    finally:
        ddp.detach()
    first = next((found for found in differences if found.problem is not None), _Difference(None))
    meaning = "gradients, updates and gathered parameters are right"
    meaning = f"with this config {meaning}" if is_configured else f"{meaning}, every rank is in them exactly once"
    own = right = Answer(Verdict.HOLDS, "exact", meaning)
    if first.problem is not None:
        own = Answer(Verdict.FINDING, first.problem.text, "training would go wrong without a word", first.problem.ranks)
    rounding = max(found.rounding for found in differences)
    facts = yield {"answer": own, "where": first.where, "is_in_gradients": first.is_in_gradients, "rounding": rounding}

    causes = [fact for fact in facts if fact["is_in_gradients"]]
    if causes:
        # Wrong gradients make wrong parameters, also at ranks that own none of these gradients: those only follow. They take
        # the word of the others about who is at fault.
        told = next((fact["answer"] for fact in causes if fact["answer"][-1]), right)
        facts = [{**fact, "answer": told} if fact["where"] and fact not in causes else fact for fact in facts]
    answer = merge([fact["answer"] for fact in facts])
    if answer.verdict is Verdict.FINDING:
        where = next(fact["where"] for fact in causes or facts if fact["where"])
        return answer._replace(text=f"{answer.text} (in {where})")
    rounding = max(fact["rounding"] for fact in facts)
    if rounding > 0:
        text = f"every rank once, but rounded: up to {rounding:.1g}"
        return Answer(Verdict.NOTE, text, "AVG rounds on this back-end; ddp.average_in_collective=false does not")
    return answer


class _Model(torch.nn.Module):
    """Parameters of several dtypes and shapes, all zero, whose gradients are this rank's contributions."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        # So large that a rank's shard of a bucket speaks of every rank of some block.
        unit = max(16, 7 * bench.size)
        shapes = ((3 * unit + 1,), (5, unit), (unit + 7,), ())
        self._coefficients: dict[str, torch.Tensor] = {}
        for dtype, (index, shape) in product((torch.float32, torch.bfloat16, torch.float16), enumerate(shapes)):
            name, values = f"{name_of(dtype)}_{index}", torch.zeros(shape, dtype=dtype, device=bench.device)
            self.register_parameter(name, torch.nn.Parameter(values))
            coded = contribution(bench.rank, bench.size, 0, values.numel())
            self._coefficients[name] = coded.float().view(shape).to(bench.device)

    def forward(self) -> torch.Tensor:
        """Return a number whose derivative by each parameter is its coefficient."""
        return torch.stack([(param.float() * self._coefficients[name]).sum() for name, param in self.named_parameters()]).sum()


class _Difference(NamedTuple):
    """How far one comparison is off: wrong, or rounded."""

    problem: Problem | None
    where: str = ""  # the parameters
    is_in_gradients: bool = False
    rounding: float = 0.0  # relative, where nothing is wrong


def _differences(ddp: DistributedDataParallel, model: _Model, bench: Bench) -> Iterator[_Difference]:
    """Train for two steps and yield every difference between this rank's tensors and the right ones."""
    config, size = ddp.ddp_config, bench.size
    divisor = 1 if config.grad_reduction == "sum" else size
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), ddp)
    grad_dtypes = {name: buffer.grad_data.dtype for buffer in ddp.param_and_grad_buffers for name in buffer.params}
    updated = {name: torch.zeros(param.numel()) for name, param in model.named_parameters()}  # float32, as the optimizer's

    def reduced(name: str, start: int, stop: int, times: int) -> torch.Tensor:
        # Whole numbers, divided and rounded once.
        return (whole_sum(size, start, stop, times=times) / divisor).to(grad_dtypes[name])

    def error_of(got: torch.Tensor, right: torch.Tensor) -> float:
        """Return 0 for the same bits, the relative error where AVG may have rounded, and infinity for wrong values."""
        if torch.equal(got, right):
            return 0.0
        error: float = (got.double() / right.double() - 1).abs().max().item()
        may_round = config.average_in_collective and error <= (size + 2) * torch.finfo(got.dtype).eps
        return error if may_round else float("inf")

    for step, times in enumerate(_MICROBATCHES, start=1):
        with ddp.no_sync():
            for _ in range(times - 1):
                ddp().backward()
        ddp().backward()
        ddp.finish_grad_sync()

        pieces = list(_pieces(ddp, bench.rank))
        errors = [error_of(grad.cpu(), reduced(name, start, start + len(grad), times)) for name, start, grad in pieces]
        wrong = [piece for piece, error in zip(pieces, errors, strict=True) if error == float("inf")]
        if wrong:
            _, start, grad = max(wrong, key=lambda piece: len(piece.grad))  # the more elements, the more surely they are read
            problem = read_sum(grad.double() * divisor, size, start=start, times=times) or Problem("values are rounded")
            problem = problem._replace(text=f"step {step}: {problem.text}")
            yield _Difference(problem, _names(piece.name for piece in wrong), is_in_gradients=True)
        else:
            yield _Difference(None, rounding=max(errors, default=0.0))

        optimizer.step()
        ddp.finish_param_sync()
        errors = []
        for name, param in model.named_parameters():
            updated[name] -= reduced(name, 0, param.numel(), times).float()
            errors.append(error_of(param.detach().reshape(-1).cpu(), updated[name].to(param.dtype)))
        names = [name for name, error in zip(updated, errors, strict=True) if error == float("inf")]
        if names:
            yield _Difference(Problem(f"step {step}: parameters are wrong after the update"), _names(names))
        else:
            yield _Difference(None, rounding=max(errors))
        optimizer.zero_grad()


class _Piece(NamedTuple):
    """What this rank can check of one gradient: all of it, or what it owns of one bucket."""

    name: str
    start: int  # in the flattened parameter
    grad: torch.Tensor  # 1D view of the buffer, gradient dtype


def _pieces(ddp: DistributedDataParallel, rank: int) -> Iterator[_Piece]:
    """Return where this rank holds reduced gradients, parameter by parameter."""
    for buffer in ddp.param_and_grad_buffers:
        if not ddp.ddp_config.use_distributed_optimizer:
            for name, slot in buffer.layout.params.items():
                yield _Piece(name, 0, buffer.grad_data[slot.start : slot.stop])
            continue
        for bucket in range(len(buffer.layout.buckets)):
            for piece in shard_slices(buffer.layout, bucket=bucket, rank=rank):
                values = buffer.grad_data[piece.in_buffer.start : piece.in_buffer.stop]
                yield _Piece(piece.param, piece.in_param.start, values)


def _names(names: Iterable[str]) -> str:
    return name_list(list(dict.fromkeys(names)))
