"""The program behind ``megabucket tune``: calibrate, profile, predict, run the best few for real, decide.

Every process of the run calls it and all of them come to the same decision: what decides is exchanged first. Candidates run in
the workload's own steps, in turn and in changing order, so that a slow moment of the machine hits all of them alike.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from megabucket import __version__
from megabucket.buffer import dtype_name
from megabucket.comm import discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError, printable
from megabucket.layout import ParamSpec
from megabucket.measure.calibrate import CalibrationPlan, measure_link, pipelined_link
from megabucket.measure.collectives import meeting
from megabucket.measure.host import host_costs, optimizer_s, time_phases
from megabucket.measure.profile import ProfilePlan, choose_rank, profile_steps
from megabucket.measure.program import Trainee, WorkloadFunction
from megabucket.measure.ranks import Launch, Note, Ranks, check_writable, joined_ranks, silent
from megabucket.planning.candidates import (
    DEFAULT,
    Candidate,
    Comparison,
    Decision,
    Measured,
    decide,
    find_candidates,
    in_mode,
    pick,
)
from megabucket.planning.documents import write_text
from megabucket.planning.links import Link
from megabucket.planning.run_config import RunConfig
from megabucket.planning.setting import SIZE_FIELDS
from megabucket.planning.simulate import FENCE, Mode
from megabucket.units import format_seconds

_CUTTING: Final = frozenset({*SIZE_FIELDS, "bucket_order", "bucket_groups"})
_CHOSEN: Final = (*SIZE_FIELDS, "bucket_order", "bucket_groups", "overlap_grad_reduce", "overlap_param_gather")
"""Fields of ``ddp`` that the tuned config has from the chosen plan."""
_WARM_STEPS: Final = 2
"""Steps before those that count in each turn: the first one shows what forward needs, the second fills the pipeline."""
_QUIET: Final = MappingProxyType({"init_sync": False})
"""What would lengthen single turns and tells nothing about the plan."""


@dataclass(frozen=True, slots=True)
class TunePlan:
    """How much is tried.

    Attributes:
        num_candidates: run for real, besides the default.
        num_rounds: turns of each of them; paired by round.
        steps_per_turn: that count.
        max_s: no round begins after so many seconds.
        all_modes: search in both modes, not in that of the config only.

    Raises:
        ConfigError: a number is out of range.
    """

    num_candidates: int = 4
    num_rounds: int = 10
    steps_per_turn: int = 2
    max_s: float = 600.0
    all_modes: bool = False

    def __post_init__(self) -> None:
        if min(self.num_candidates, self.num_rounds, self.steps_per_turn) < 1 or self.max_s <= 0:
            raise ConfigError(
                f"--candidates={self.num_candidates}, --rounds={self.num_rounds}, --steps={self.steps_per_turn} and "
                f"--seconds={self.max_s:g} must all be more than 0; with less nothing is compared"
            )


@dataclass(frozen=True)
class Tuning:
    """What was found, equal on all ranks."""

    candidates: tuple[Candidate, ...]
    """All that were predicted, the default among them; the best first."""
    seconds: Mapping[str, tuple[float, ...]]
    """Measured seconds of a step, by candidate that was run; one number for each round."""
    decision: Decision
    facts: Mapping[str, Any]
    """Plain data: ranks, back-end, host costs, what the profile says."""

    def candidate(self, name: str) -> Candidate:
        """Return a candidate by its name."""
        return next(each for each in self.candidates if each.name == name)

    @property
    def choice(self) -> Candidate:
        """What is recommended."""
        return self.candidate(self.decision.choice)

    def measured_s(self, name: str) -> float:
        """Return the median seconds of a step of a candidate that was run."""
        return statistics.median(self.seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """Return all evidence as plain data, ready for JSON."""
        comparisons = {each.name: each for each in self.decision.comparisons}
        rows = []
        for each in self.candidates:
            changed = each.ddp.model_dump(mode="json", include={*_CUTTING, "use_distributed_optimizer", "overlap_param_gather"})
            row: dict[str, Any] = {
                "name": each.name,
                "mode": each.mode.value,
                "num_buckets": each.num_buckets,
                "predicted_s": each.predicted_s,
                "ddp": {name: value for name, value in changed.items() if value is not None},
            }
            if each.name in self.seconds:
                measured_s = self.measured_s(each.name)
                row |= {"measured_s": measured_s, "prediction_error": each.predicted_s / measured_s - 1}
                row |= {"seconds": list(self.seconds[each.name]), "bucket_numel": each.ddp.bucket_size}
                row |= {"low_s": min(self.seconds[each.name]), "high_s": max(self.seconds[each.name])}
            if (found := comparisons.get(each.name)) is not None:
                row |= {"gain": found.gain, "gain_low": found.low, "gain_high": min(found.high, 1e9), "p_value": found.p_value}
                row |= {"num_faster": found.num_faster, "num_rounds": found.num_rounds}
            rows.append(row)
        return {"choice": self.decision.choice, "is_default": self.decision.is_default, "facts": self.facts, "candidates": rows}


def tune_program(
    workload: WorkloadFunction,
    config: RunConfig,
    plan: TunePlan,
    *,
    launch: Launch,
    outputs: Sequence[Path] = (),
    note: Note = silent,
) -> Tuning:
    """Tune the ``ddp`` section of a config for a workload on the ranks of this run. Every process calls it.

    Args:
        outputs: files that the first rank will write; looked at before anything is measured.
        note: called on the first rank with what happens next.

    Raises:
        ConfigError: one rank only, a config that cannot be honoured, or a file that cannot be written.
    """
    if launch.num_ranks == 1:
        raise ConfigError(
            "one rank sends nothing, so there is nothing to tune; start more with torchrun --nproc-per-node 2 -m megabucket "
            "tune --workload package.module:function"
        )
    with joined_ranks(launch, config.fabric, note=note) as ranks:
        check_writable(ranks, outputs)
        return _Tuner(workload, config, ranks, until_s=time.monotonic() + plan.max_s).tune(plan)


class _Tuner:
    """A workload on its ranks, with one wrapper for each kind of config that a rebuild cannot change."""

    def __init__(self, workload: WorkloadFunction, config: RunConfig, ranks: Ranks, *, until_s: float) -> None:
        self._workload, self._config, self._ranks, self._until_s = workload, config, ranks, until_s
        self._trainees: dict[str, Trainee] = {}
        params = self._trainee_of(config.ddp).ddp.module.named_parameters()
        self._specs = tuple(
            ParamSpec(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in params if param.requires_grad
        )

    def tune(self, plan: TunePlan) -> Tuning:
        """Measure, search, run, decide."""
        default, say = self._config.ddp, self._ranks.note
        say("calibrating the link")
        link, overhead_s = self._measure_link()
        measured = {}
        for mode in Mode if plan.all_modes else (Mode.of(default),):
            say(f"profiling, {mode.value}")
            measured[mode] = self._measure_mode(in_mode(default, mode), link, overhead_s)
        candidates = find_candidates(self._specs, default, measured, link, num_ranks=self._ranks.num_ranks)
        finalists = pick(candidates, plan.num_candidates)
        say(f"{len(candidates)} candidates predicted; running {len(finalists)} of them")
        seconds = self._run(finalists, plan)
        for trainee in self._trainees.values():
            trainee.ddp.detach()
        fabric = self._config.fabric
        facts = {
            "num_ranks": self._ranks.num_ranks,
            "backend": self._ranks.backend,
            "fabric": None if fabric is None else fabric.model_dump(),
            "collective_overhead_s": overhead_s,
            "modes": {mode.value: _mode_facts(known) for mode, known in measured.items()},
        }
        return Tuning(candidates, seconds, decide(seconds), facts)

    def _measure_link(self) -> tuple[Link, float]:
        """Return what collectives take on the lane, and by how much one that is waited for alone takes longer."""
        num_bytes = sum(spec.numel for spec in self._specs) * 4
        plan = CalibrationPlan(max_bytes=max(num_bytes, 2**14), repetitions=5)
        calibration = measure_link(plan, self._ranks, fabric=self._config.fabric)
        with closing(discover_communicator(None)) as communicator:
            lane = pipelined_link(calibration, communicator, device=self._ranks.device)
        alone_s, in_flight_s = (link.collective_s(*FENCE, self._ranks.num_ranks) for link in (calibration.link, lane))
        return lane, alone_s - in_flight_s

    def _measure_mode(self, ddp: DistributedDataParallelConfig, link: Link, wake_s: float) -> Measured:
        plan = ProfilePlan(num_steps=6, num_warmup_steps=2)
        own = profile_steps(self._workload(self._config, self._ranks), ddp, plan, counts_launches=False)
        workload = choose_rank(self._ranks.gather(own), "median").workload
        base = ddp.model_copy(update=dict.fromkeys((*SIZE_FIELDS, "bucket_order")))
        trainee, phases = self._trainee_of(base), []
        for numel in (sum(spec.numel for spec in self._specs), 1):
            _cut(trainee, base.model_copy(update={"bucket_size": numel}))
            phases.append(time_phases(trainee.ddp, trainee.optimizer, trainee.backward))
        few, many = phases
        group: dict[str, Any] = {"num_ranks": self._ranks.num_ranks, "is_sharded": ddp.use_distributed_optimizer}
        host = host_costs(few, many, link, wake_s=wake_s, **group)
        return Measured(replace(workload, optimizer_s=optimizer_s(few, many, host, link, **group)), host)

    def _run(self, finalists: Sequence[Candidate], plan: TunePlan) -> dict[str, tuple[float, ...]]:
        own: dict[str, list[float]] = {each.name: [] for each in finalists}
        for number in range(plan.num_rounds):
            # All ranks go by the clock of the first one.
            if number and self._ranks.gather(time.monotonic() > self._until_s)[0]:
                break
            self._ranks.note(f"round {number + 1}/{plan.num_rounds}")
            for each in random.Random(number).sample(finalists, len(finalists)):  # noqa: S311 - alike on all ranks
                own[each.name].append(_turn(self._trainee_of(each.ddp), each.ddp, plan.steps_per_turn))
        everybody = self._ranks.gather(own)
        return {name: tuple(max(times) for times in zip(*(one[name] for one in everybody), strict=True)) for name in own}

    def _trainee_of(self, ddp: DistributedDataParallelConfig) -> Trainee:
        key = ddp.model_dump_json(exclude=set(_CUTTING))
        if key not in self._trainees:
            program = self._workload(self._config, self._ranks)
            self._trainees[key] = Trainee(program, ddp.model_copy(update=_QUIET))
        return self._trainees[key]


def _cut(trainee: Trainee, ddp: DistributedDataParallelConfig) -> None:
    """Give a trainee another plan."""
    trainee.ddp.rebuild(ddp.model_copy(update=_QUIET))


def _turn(trainee: Trainee, ddp: DistributedDataParallelConfig, num_steps: int) -> float:
    """Return the mean seconds of ``num_steps`` steps in the steady state with a plan."""
    _cut(trainee, ddp)
    meeting(trainee.ddp.communicator, device=trainee.ddp.param_and_grad_buffers[0].grad_data.device)()
    for _ in range(_WARM_STEPS):
        trainee.step()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        trainee.step()
    seconds = (time.perf_counter() - start_s) / num_steps
    trainee.ddp.finish_param_sync()
    return seconds


def _mode_facts(known: Measured) -> dict[str, Any]:
    seconds = {name: getattr(known.workload, name) for name in ("forward_s", "backward_s", "optimizer_s")}
    return {"host": known.host.to_dict(), **seconds}


# What the command leaves behind: a config with the evidence in its comments, and the evidence as JSON. #


def write_tuning(config: RunConfig, tuning: Tuning, *, out: Path, evidence: Path) -> None:
    """Write the config with the chosen plan, and the evidence as JSON.

    Raises:
        ConfigError: a file cannot be written.
    """
    write_text(out, tuned_text(config, tuning))
    write_text(evidence, json.dumps(tuning.to_dict(), indent=1, allow_nan=False) + "\n")


def tuned_text(config: RunConfig, tuning: Tuning) -> str:
    """Return the config with the chosen plan as YAML, the evidence in comments before it."""
    header = [f"megabucket tune {__version__}, {datetime.now(timezone.utc).isoformat(timespec='seconds')}", *describe(tuning)]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in header)
    return comments + "\n" + yaml.safe_dump(tuned_data(config, tuning.choice), sort_keys=False, allow_unicode=True)


def tuned_data(config: RunConfig, choice: Candidate) -> dict[str, Any]:
    """Return the config as plain data, with the chosen fields of ``ddp`` in place of its own; the default changes nothing."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    if choice.name == DEFAULT:
        return data
    replaced = (*_CHOSEN, "use_distributed_optimizer")
    ddp = {name: value for name, value in data.pop("ddp", {}).items() if name not in replaced}
    chosen = choice.ddp.model_dump(mode="json", include=set(_CHOSEN))
    ddp |= {name: chosen[name] for name in _CHOSEN if name in chosen and chosen[name] is not None}
    is_sharded = choice.mode is Mode.REDUCE_SCATTER
    data.pop("mode", None)
    return {"mode": "reduce_scatter" if is_sharded else "all_reduce", **data, "ddp": ddp}


def describe(tuning: Tuning) -> list[str]:
    """Return what was found, a line for each plan that was run and before them one for the decision."""
    facts, comparisons = tuning.facts, {each.name: each for each in tuning.decision.comparisons}
    counts = f"{len(tuning.candidates)} plans predicted, {len(tuning.seconds)} run"
    lines = [_verdict(tuning), f"{facts['num_ranks']} ranks, {facts['backend']}; {counts}"]
    for name in sorted(tuning.seconds, key=tuning.measured_s):
        each, measured_s = tuning.candidate(name), tuning.measured_s(name)
        text = (
            f"{printable(name)} ({each.num_buckets} buckets): predicted {format_seconds(each.predicted_s)}, measured "
            f"{format_seconds(measured_s)} (error {each.predicted_s / measured_s - 1:+.1%})"
        )
        lines.append(f"  {text}{_gain(comparisons[name])}" if name in comparisons else f"  {text}")
    return lines


def _gain(found: Comparison) -> str:
    interval = f"{found.low:+.1%} to {found.high:+.1%}" if found.low > -1 else "too few rounds for an interval"
    return f", {found.gain:+.1%} against the default ({interval}; faster in {found.num_faster} of {found.num_rounds} rounds)"


def _verdict(tuning: Tuning) -> str:
    found = tuning.decision.chosen
    if found is None:
        return "no candidate is better than the default beyond noise; the config stays as it is"
    return (
        f"{printable(found.name)} is faster than the default by {found.gain:.1%} (95 % interval over all candidates: "
        f"{found.low:.1%} to {found.high:.1%}, sign test p = {found.p_value:.2g})"
    )
