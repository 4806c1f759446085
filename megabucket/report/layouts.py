"""The layout that a config gives, also where only a workload says which tensors there are. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import replace

from megabucket.layout import ModelLayout, ParamSpec, build_layout, launch_order
from megabucket.planning.cuts import BucketPlan, plan_of_layout
from megabucket.planning.setting import SIZE_FIELDS, Setting


def sizes_buckets(setting: Setting) -> bool:
    """Return whether the config says how large buckets are."""
    return any(getattr(setting.ddp, name) is not None for name in SIZE_FIELDS)


def specs_of(setting: Setting) -> tuple[ParamSpec, ...]:
    """Return the model's parameters; without a model one vector for each tensor of the workload."""
    if setting.specs is not None:
        return setting.specs
    workload = setting.workload
    return tuple(ParamSpec(tensor.name, (tensor.numel,), workload.param_dtype) for tensor in workload.tensors)


def layout_of(setting: Setting, *, is_default: bool = False) -> ModelLayout:
    """Return the layout that the config gives, or the one it gives without the fields that size buckets.

    Raises:
        ConfigError: the config cannot be honoured for these parameters.
        LayoutError: no buffer can hold them.
    """
    ddp = setting.ddp.model_copy(update=dict.fromkeys(SIZE_FIELDS)) if is_default else setting.ddp
    return build_layout(specs_of(setting), ddp, dp_size=setting.dp_size, expert_dp_size=setting.expert_dp_size)


def layout_plan(setting: Setting, layout: ModelLayout) -> BucketPlan:
    """Return the buckets of a layout, with the bytes they send, padding included.

    Raises:
        ConfigError: the workload is of another model.
    """
    workload = setting.workload
    plan = plan_of_layout(workload, layout)
    if setting.specs is not None:
        return plan
    # Without a model the workload says what an element takes on the wire; the layout could only guess a dtype.
    numels = [layout.buffers[id_.buffer].buckets[id_.bucket].numel for id_ in launch_order(layout)]
    return replace(
        plan,
        grad_bytes=tuple(numel * workload.bytes_per_element for numel in numels),
        param_bytes=tuple(numel * workload.param_bytes_per_element for numel in numels),
    )
