"""Where parameters lie: pure data and arithmetic, importable without torch."""

from megabucket.layout.build import build_layout
from megabucket.layout.layout import BucketId, BucketLayout, BufferLayout, ModelLayout, ParamSlot, Span, launch_order
from megabucket.layout.serialize import layout_diff
from megabucket.layout.shards import ShardOwners, ShardSlice, shard_owners, shard_slices
from megabucket.layout.spec import BufferKey, ParamSpec

__all__ = [
    "BucketId",
    "BucketLayout",
    "BufferKey",
    "BufferLayout",
    "ModelLayout",
    "ParamSlot",
    "ParamSpec",
    "ShardOwners",
    "ShardSlice",
    "Span",
    "build_layout",
    "launch_order",
    "layout_diff",
    "shard_owners",
    "shard_slices",
]
