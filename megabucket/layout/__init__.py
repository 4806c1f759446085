"""Layouts of parameters in buffers: data and arithmetic, importable without torch."""

from megabucket.layout.build import build_layout
from megabucket.layout.identity import IdentityOf, ParamIdentity, check_identities, megatron_identity, plain_identity
from megabucket.layout.layout import BucketId, BucketLayout, BufferLayout, ModelLayout, ParamSlot, Span, launch_order
from megabucket.layout.owners import (
    BucketExchange,
    OwnedTensor,
    OwnerPlan,
    newton_schulz_flop,
    plan_exchange,
    plan_owners,
)
from megabucket.layout.shards import ShardSlice, shard_owners, shard_slices
from megabucket.layout.spec import BufferKey, ParamSpec

__all__ = [
    "BucketExchange",
    "BucketId",
    "BucketLayout",
    "BufferKey",
    "BufferLayout",
    "IdentityOf",
    "ModelLayout",
    "OwnedTensor",
    "OwnerPlan",
    "ParamIdentity",
    "ParamSlot",
    "ParamSpec",
    "ShardSlice",
    "Span",
    "build_layout",
    "check_identities",
    "launch_order",
    "megatron_identity",
    "newton_schulz_flop",
    "plain_identity",
    "plan_exchange",
    "plan_owners",
    "shard_owners",
    "shard_slices",
]
