"""Answers about a model that need no model: its parameters, where they would lie, and how long a step would take. No torch."""

from megabucket.planning.architecture import param_specs
from megabucket.planning.cuts import BucketPlan, per_tensor_plan, plan_of_layout, single_plan, uniform_plan
from megabucket.planning.links import FlatLink, Link, MeasuredLink, RingLink, TwoLevelLink
from megabucket.planning.partition import lower_bound_s, optimal_plan
from megabucket.planning.run_config import RunConfig, load_config
from megabucket.planning.simulate import Mode, simulate_step_s, simulate_steps
from megabucket.planning.workload import TensorWork, Workload

__all__ = [
    "BucketPlan",
    "FlatLink",
    "Link",
    "MeasuredLink",
    "Mode",
    "RingLink",
    "RunConfig",
    "TensorWork",
    "TwoLevelLink",
    "Workload",
    "load_config",
    "lower_bound_s",
    "optimal_plan",
    "param_specs",
    "per_tensor_plan",
    "plan_of_layout",
    "simulate_step_s",
    "simulate_steps",
    "single_plan",
    "uniform_plan",
]
