"""Layouts of parameters in buffers: data and arithmetic, importable without torch."""

from megabucket.layout.build import build_layout
from megabucket.layout.identity import IdentityOf, ParamIdentity, check_identities, megatron_identity, plain_identity
from megabucket.layout.layout import BucketId, BucketLayout, BufferLayout, ModelLayout, ParamSlot, Span, launch_order
from megabucket.layout.shards import ShardSlice, shard_owners, shard_slices
from megabucket.layout.spec import BufferKey, ParamSpec

__all__ = [
    "BucketId",
    "BucketLayout",
    "BufferKey",
    "BufferLayout",
    "IdentityOf",
    "ModelLayout",
    "ParamIdentity",
    "ParamSlot",
    "ParamSpec",
    "ShardSlice",
    "Span",
    "build_layout",
    "check_identities",
    "launch_order",
    "megatron_identity",
    "plain_identity",
    "shard_owners",
    "shard_slices",
]
