"""``BucketPlan``: which tensors share a collective, and uniform plans. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megabucket.errors import ConfigError
from megabucket.layout import BufferKey, ModelLayout, ParamSpec, launch_order, plan_owners
from megabucket.planning.owners import busiest_exchange, exchanged_numel
from megabucket.planning.workload import Workload, check_workload_matches
from megabucket.units import dtype_bytes


@dataclass(frozen=True)
class BucketPlan:
    """Tensors by bucket, in launch order.

    Args:
        buckets: tensor indices of each bucket. Every tensor of the workload is in one bucket; the last index of a bucket is the
            tensor that closes it.
        grad_bytes: bytes of each bucket's gradients on the wire, padding included; ``None``: what its tensors have.
        param_bytes: bytes of each bucket's parameters on the wire, padding included; ``None``: what its tensors have.
        num_ranks: ranks that reduce each bucket (expert buckets may have fewer); ``None``: those of the simulation.
        to_owner_bytes: bytes that the rank with most of them over all buckets sends to the owners of each bucket's tensors, or
            receives as an owner, whichever are more; ``None``: there are no owners.
        from_owner_bytes: the same of the new values, on the way back.
    """

    buckets: tuple[tuple[int, ...], ...]
    grad_bytes: tuple[int, ...] | None = None
    param_bytes: tuple[int, ...] | None = None
    num_ranks: tuple[int, ...] | None = None
    to_owner_bytes: tuple[int, ...] | None = None
    from_owner_bytes: tuple[int, ...] | None = None

    def cut_names(self, workload: Workload) -> tuple[str, ...]:
        """Return the names of the tensors that close the buckets, in launch order."""
        return tuple(workload.tensors[bucket[-1]].name for bucket in self.buckets)

    def grad_sizes_bytes(self, workload: Workload) -> tuple[int, ...]:
        """Return the bytes of gradients each bucket sends."""
        return self.grad_bytes or self._sizes_bytes(workload, workload.bytes_per_element)

    def param_sizes_bytes(self, workload: Workload) -> tuple[int, ...]:
        """Return the bytes of parameters each bucket gathers."""
        return self.param_bytes or self._sizes_bytes(workload, workload.param_bytes_per_element)

    def num_collectives(self, workload: Workload) -> int:
        """Return how many buckets have anything to send."""
        return sum(size > 0 for size in self.grad_sizes_bytes(workload))

    def _sizes_bytes(self, workload: Workload, bytes_per_element: int) -> tuple[int, ...]:
        tensors = workload.tensors
        return tuple(sum(tensors[index].numel for index in bucket) * bytes_per_element for bucket in self.buckets)


def uniform_plan(workload: Workload, bucket_numel: int) -> BucketPlan:
    """Return the plan of one size: walk the tensors in ready order, close a bucket at ``>= bucket_numel`` elements.

    No padding, no alignment; tensors of no elements at the end become a bucket that sends nothing.

    Raises:
        ConfigError: ``bucket_numel`` is not a positive integer.
    """
    if isinstance(bucket_numel, bool) or not isinstance(bucket_numel, int) or bucket_numel < 1:
        raise ConfigError(f"bucket_numel={bucket_numel!r} is not a bucket size; give a number of elements, at least 1")
    buckets: list[tuple[int, ...]] = []
    open_bucket: list[int] = []
    filled_numel = 0
    tensors = workload.tensors
    for index in workload.order:
        open_bucket.append(index)
        filled_numel += tensors[index].numel
        if filled_numel >= bucket_numel:
            buckets.append(tuple(open_bucket))
            open_bucket, filled_numel = [], 0
    if open_bucket:
        buckets.append(tuple(open_bucket))
    return BucketPlan(tuple(buckets))


def per_tensor_plan(workload: Workload) -> BucketPlan:
    """Return the plan of one bucket for each tensor."""
    return BucketPlan(tuple((index,) for index in workload.order))


def cuts_by_buffer(plan: BucketPlan, specs: Sequence[ParamSpec]) -> tuple[str, ...]:
    """Return the ``ddp.bucket_cuts`` of a plan: where parameters lie in several buffers, each is cut wherever the plan cuts.

    Args:
        specs: by the tensor indices of the plan.
    """
    cuts: list[str] = []
    for bucket in plan.buckets:
        last_of = {(specs[index].dtype, specs[index].group): specs[index].name for index in bucket}
        cuts += last_of.values()
    return tuple(cuts)


def plan_of_layout(workload: Workload, layout: ModelLayout, whole_params: Collection[str] = ()) -> BucketPlan:
    """Return the buckets of a layout in launch order, with the bytes they send, padding included.

    Args:
        whole_params: those that are updated whole, each at its owner.

    Raises:
        ConfigError: the workload is of another model: names, order or sizes differ.
    """
    slots = [(slot.registration_index, name, slot) for buffer in layout.buffers for name, slot in buffer.params.items()]
    found = [(name, slot.numel) for _, name, slot in sorted(slots)]
    if found != [(tensor.name, tensor.numel) for tensor in workload.tensors]:
        check_workload_matches(workload, [ParamSpec(name, (numel,)) for name, numel in found])
    index_of = {tensor.name: index for index, tensor in enumerate(workload.tensors)}
    chosen = [(layout.buffers[id_.buffer], layout.buffers[id_.buffer].buckets[id_.bucket]) for id_ in launch_order(layout)]
    exchanges: list[tuple[BufferKey, int]] = []
    if whole_params:
        owners = plan_owners(layout, whole_params)
        rank = busiest_exchange(layout, owners)
        for buffer, bucket in chosen:
            position = rank % buffer.num_shards
            exchanges.append((buffer.key, exchanged_numel(buffer, bucket, owners.owner_of, rank=position)))
    is_sharded = any(buffer.num_shards > 1 for buffer in layout.buffers)
    return BucketPlan(
        buckets=tuple(tuple(index_of[name] for name in bucket.params) for _, bucket in chosen),
        grad_bytes=tuple(bucket.numel * dtype_bytes(buffer.key.grad_dtype) for buffer, bucket in chosen),
        param_bytes=tuple(bucket.numel * dtype_bytes(buffer.key.param_dtype) for buffer, bucket in chosen),
        num_ranks=tuple(buffer.num_shards for buffer, _ in chosen) if is_sharded else None,
        to_owner_bytes=tuple(numel * dtype_bytes(key.grad_dtype) for key, numel in exchanges) or None,
        from_owner_bytes=tuple(numel * dtype_bytes(key.param_dtype) for key, numel in exchanges) or None,
    )
