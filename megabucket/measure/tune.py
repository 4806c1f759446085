"""The program behind ``megabucket tune``: calibrate, profile, predict, run the best few for real, decide.

Every rank calls it and comes to the same decision, because all numbers behind it are exchanged first. Candidates run in the
workload's own steps, in turn and in changing order, so that a slow moment of the machine affects all of them alike.
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
from typing import Any, Final

import yaml

from megabucket._version import __version__
from megabucket.comm import discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError, printable
from megabucket.measure.calibrate import CalibrationPlan, measure_link, pipelined_link
from megabucket.measure.collectives import meeting
from megabucket.measure.host import host_costs, optimizer_s, time_phases
from megabucket.measure.profile import ProfilePlan, choose_rank, profile_steps
from megabucket.measure.program import Trainee, TrainingProgram, WorkloadFunction, make_program, trainable_specs
from megabucket.measure.ranks import Ranks, check_writable
from megabucket.planning.advice import DEFAULT_BUCKETS, THIS_CONFIG, Choice, advise_change, config_lines
from megabucket.planning.by_host import HostAdvice, advise_by_host
from megabucket.planning.candidates import (
    DEFAULT,
    Candidate,
    Decision,
    Measured,
    decide,
    find_candidates,
    in_mode,
    pick,
    saved_fraction,
)
from megabucket.planning.documents import write_text
from megabucket.planning.links import Link
from megabucket.planning.run_config import RunConfig
from megabucket.planning.setting import SIZE_FIELDS, Setting
from megabucket.planning.simulate import FENCE, Mode

_CUTTING: Final = (*SIZE_FIELDS, "bucket_order", "bucket_groups")
"""Fields of ``ddp`` that ``rebuild`` can change."""
_CHOSEN: Final = (*_CUTTING, "overlap_grad_reduce", "overlap_param_gather")
"""Fields of ``ddp`` that the tuned config takes from the chosen plan."""
_POOR_PREDICTION: Final = 0.25
"""Fraction of the measured step; when no prediction is closer the model does not fit."""
_WARM_STEPS: Final = 2
"""Uncounted steps of each turn: the first one learns what forward needs, the second fills the pipeline."""


@dataclass(frozen=True, slots=True)
class TunePlan:
    """How much is tried.

    Attributes:
        num_candidates: plans that run for real, besides the default.
        num_rounds: turns of each of them; paired by round.
        steps_per_turn: steps that count.
        max_s: no round but the first begins later than this after the start of the calibration, which is not cut short.
        all_modes: search in both modes, not only in the config's.
    """

    num_candidates: int = 4
    num_rounds: int = 10
    steps_per_turn: int = 2
    max_s: float = 600.0
    all_modes: bool = False


@dataclass(frozen=True)
class Tuning:
    """The result, equal on all ranks."""

    candidates: tuple[Candidate, ...]
    """All predicted plans, the default included; the best first."""
    seconds: Mapping[str, tuple[float, ...]]
    """Measured seconds of a step, by candidate that ran; one number for each round."""
    decision: Decision
    facts: Mapping[str, Any]
    """Plain data: ranks, back-end, host costs, the profile's times."""
    by_host: HostAdvice | None = None
    """Shards inside each host against the config's, on the measured link; ``None`` where ranks are no grid of hosts."""

    @property
    def choice(self) -> Candidate:
        """The recommended plan."""
        return next(each for each in self.candidates if each.name == self.decision.choice)

    def measured_s(self, name: str) -> float:
        """Return the median seconds of a step of a candidate that ran."""
        return statistics.median(self.seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """Return all evidence as plain data, ready for JSON."""
        comparisons = {each.name: each for each in self.decision.comparisons}
        shown = {*_CUTTING, "use_distributed_optimizer", "overlap_param_gather"}
        rows = []
        for each in self.candidates:
            row: dict[str, Any] = {
                "name": each.name,
                "mode": each.mode.value,
                "num_buckets": each.num_buckets,
                "predicted_s": each.predicted_s,
                "ddp": each.ddp.model_dump(mode="json", include=shown, exclude_none=True),
            }
            if (seconds := self.seconds.get(each.name)) is not None:
                measured_s = self.measured_s(each.name)
                row |= {"measured_s": measured_s, "prediction_error": each.predicted_s / measured_s - 1}
                row |= {"low_s": min(seconds), "high_s": max(seconds), "seconds": list(seconds)}
                row["bucket_numel"] = each.ddp.bucket_size
            if (found := comparisons.get(each.name)) is not None:
                row |= {"gain": found.gain, "gain_low": found.low, "gain_high": min(found.high, 1e9), "p_value": found.p_value}
                row |= {"num_faster": found.num_faster, "num_rounds": found.num_rounds}
            rows.append(row)
        names = ("choice", "is_default", "is_undecided", "num_rounds_needed", "visible_gain")
        return {
            "advice": self.summary[0],
            **{name: getattr(self.decision, name) for name in names},
            "facts": self.facts,
            "by_host": None if self.by_host is None else self.by_host.to_dict(),
            "candidates": rows,
        }

    @property
    def default(self) -> Candidate:
        """The config as it was given."""
        return next(each for each in self.candidates if each.name == DEFAULT)

    @property
    def config_lines(self) -> tuple[str, ...]:
        """The fields that the recommended plan changes, as YAML to paste; nothing for the default."""
        old, new = self.default, self.choice
        fields = {name: getattr(new.ddp, name) for name in _CHOSEN if getattr(new.ddp, name) != getattr(old.ddp, name)}
        if not fields:
            return ()
        return config_lines(fields) + ((f"mode: {new.mode.value}",) if new.mode is not old.mode else ())

    @property
    def _verdict(self) -> str:
        """What to do."""
        decision, default = self.decision, self.default
        name = THIS_CONFIG if default.size else DEFAULT_BUCKETS
        if decision.is_undecided:
            needed = decision.num_rounds_needed
            advice = f"give more --seconds and at least --rounds {needed}, or fewer --candidates"
            return f"Keep {name}, undecided: rounds done {decision.num_rounds}, needed {needed}. To decide, {advice}."
        if (chosen := decision.chosen) is not None:
            step_s = self.measured_s(DEFAULT)
            interval = f"{saved_fraction(chosen.low):.1%} to {saved_fraction(chosen.high):.1%}"
            evidence = f"95 % interval over all candidates: {interval}, sign test p = {chosen.p_value:.2g}"
            current = Choice(name, default.num_buckets, step_s)
            offered = Choice(printable(chosen.name), self.choice.num_buckets, self.measured_s(chosen.name))
            how_known = f"measured in {decision.num_rounds} rounds ({evidence})"
            return advise_change(current, offered, chosen.saved_fraction * step_s, how_known)
        if not decision.comparisons:
            return f"Keep {name}: every size gives the same buckets."
        return f"Keep {name}: no plan that ran is faster beyond noise."

    @property
    def summary(self) -> tuple[str, ...]:
        """What to do, where and on how many plans it rests and what it could see, and whether all predictions missed."""
        counts = f"{len(self.candidates)} plans predicted, {len(self.seconds)} run"
        where = f"{self.facts['num_ranks']} ranks, {self.facts['backend']}; {counts}"
        if (visible := self.decision.visible_gain) is not None:
            saving = f"{'at least ' * self.decision.is_undecided}{saved_fraction(visible):.1%} of a step"
            where += f"; smallest visible saving at this noise: {saving}"
        verdict = self._verdict
        errors = [each.predicted_s / self.measured_s(each.name) - 1 for each in self.candidates if each.name in self.seconds]
        lines = (verdict, where, *(() if self.by_host is None else self.by_host.sentences))
        if (least := min(map(abs, errors))) < _POOR_PREDICTION:
            return lines
        way = "too long" if min(errors) > 0 else "too short" if max(errors) < 0 else "off"
        missed = (
            f"every prediction is at least {least:.0%} {way}: the measured link or compute is not that of these steps, and "
            "plans that were not run may be better. Keep the machine idle, compare with megabucket calibrate and profile, "
            "raise --candidates"
        )
        return (*lines, missed)


def tune_program(
    workload: WorkloadFunction, config: RunConfig, plan: TunePlan, *, ranks: Ranks, outputs: Sequence[Path] = ()
) -> Tuning:
    """Tune the ``ddp`` section of a config for a workload on these ranks. Every rank calls it.

    Args:
        outputs: files that the first rank will write; checked before the measurement.

    Raises:
        ConfigError: there is one rank only, the config cannot be honoured, or a file cannot be written.
    """
    if ranks.num_ranks == 1:
        raise ConfigError(
            "one rank sends nothing, so there is nothing to tune; start more with torchrun --nproc-per-node 2 -m megabucket "
            "tune --workload package.module:function"
        )
    check_writable(ranks, outputs)
    return _Tuner(workload, config, ranks).tune(plan)


class _Tuner:
    """A workload on its ranks, with one wrapper for each kind of config that a rebuild cannot change."""

    def __init__(self, workload: WorkloadFunction, config: RunConfig, ranks: Ranks) -> None:
        self._workload, self._config, self._ranks = workload, config, ranks
        self._trainees: dict[str, Trainee] = {}
        self._specs = trainable_specs(self._trainee_of(config.ddp).ddp.module)

    def tune(self, plan: TunePlan) -> Tuning:
        """Measure, search, run, decide."""
        start_s = time.monotonic()
        default, ranks = self._config.ddp, self._ranks
        ranks.note("calibrating the link")
        link, overhead_s = self._measure_link()
        measured = {}
        for mode in Mode if plan.all_modes else (Mode.of(default),):
            ranks.note(f"profiling, {mode.value}")
            measured[mode] = self._measure_mode(in_mode(default, mode), link, overhead_s)
        candidates = find_candidates(self._specs, default, measured, link, num_ranks=ranks.num_ranks)
        finalists = pick(candidates, plan.num_candidates)
        ranks.note(f"{len(candidates)} candidates predicted; running {len(finalists)} of them")
        seconds = self._run(finalists, plan, until_s=start_s + plan.max_s)
        for trainee in self._trainees.values():
            trainee.ddp.detach()
        facts = {
            "num_ranks": ranks.num_ranks,
            "backend": ranks.backend,
            "fabric": self._config.model_dump(include={"fabric"})["fabric"],
            "collective_overhead_s": overhead_s,
            "modes": {mode.value: _mode_facts(known) for mode, known in measured.items()},
        }
        known = measured[Mode.of(default)]
        setting = Setting(known.workload, link, default, ranks.num_ranks, self._specs, host=known.host)
        decision = decide(seconds, {each.name: each.num_buckets for each in candidates})
        return Tuning(candidates, seconds, decision, facts, advise_by_host(setting))

    def _measure_link(self) -> tuple[Link, float]:
        """Return the times of collectives on the lane, and the extra time of one that is waited for alone."""
        num_bytes = sum(spec.numel for spec in self._specs) * 4
        plan = CalibrationPlan(max_bytes=max(num_bytes, 2**14), repetitions=5)
        calibration = measure_link(plan, self._ranks)
        with closing(discover_communicator(None)) as communicator:
            lane = pipelined_link(calibration, communicator, device=self._ranks.device)
        alone_s, in_flight_s = (link.collective_s(*FENCE, self._ranks.num_ranks) for link in (calibration.link, lane))
        return lane, alone_s - in_flight_s

    def _measure_mode(self, ddp: DistributedDataParallelConfig, link: Link, wake_s: float) -> Measured:
        plan = ProfilePlan(num_steps=6, num_warmup_steps=2)
        own = profile_steps(self._make_program(), ddp, plan, counts_launches=False)
        workload = choose_rank(self._ranks.gather(own), "median").workload
        base = ddp.model_copy(update=dict.fromkeys((*SIZE_FIELDS, "bucket_order")))
        trainee, phases = self._trainee_of(base), []
        for numel in (workload.numel, 1):
            trainee.ddp.rebuild(_quiet(base.model_copy(update={"bucket_size": numel})))
            phases.append(time_phases(trainee.ddp, trainee.optimizer, trainee.backward))
        few, many = phases
        group: dict[str, Any] = {"num_ranks": self._ranks.num_ranks, "is_sharded": ddp.use_distributed_optimizer}
        host = host_costs(few, many, link, wake_s=wake_s, **group)
        return Measured(replace(workload, optimizer_s=optimizer_s(few, many, host, link, **group)), host)

    def _run(self, finalists: Sequence[Candidate], plan: TunePlan, *, until_s: float) -> dict[str, tuple[float, ...]]:
        own: dict[str, list[float]] = {each.name: [] for each in finalists}
        for number in range(plan.num_rounds):
            # All ranks use the clock of the first one.
            if number and self._ranks.gather(time.monotonic() > until_s)[0]:
                break
            self._ranks.note(f"round {number + 1}/{plan.num_rounds}")
            for each in random.Random(number).sample(finalists, len(finalists)):  # noqa: S311 - alike on all ranks
                own[each.name].append(_turn(self._trainee_of(each.ddp), each.ddp, plan.steps_per_turn))
        of_ranks = self._ranks.gather(own)
        return {name: tuple(max(times) for times in zip(*(each[name] for each in of_ranks), strict=True)) for name in own}

    def _make_program(self) -> TrainingProgram:
        return make_program(self._workload, self._config, self._ranks)

    def _trainee_of(self, ddp: DistributedDataParallelConfig) -> Trainee:
        key = ddp.model_dump_json(exclude=set(_CUTTING))
        if key not in self._trainees:
            self._trainees[key] = Trainee(self._make_program(), _quiet(ddp))
        return self._trainees[key]


def _quiet(ddp: DistributedDataParallelConfig) -> DistributedDataParallelConfig:
    """Return the config without the broadcast of parameters, which would lengthen single turns."""
    return ddp.model_copy(update={"init_sync": False})


def _turn(trainee: Trainee, ddp: DistributedDataParallelConfig, num_steps: int) -> float:
    """Return the mean seconds of ``num_steps`` steps in the steady state with a plan."""
    trainee.ddp.rebuild(_quiet(ddp))
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
    work = known.workload
    times = {"forward_s": work.forward_s, "backward_s": work.backward_s, "optimizer_s": work.optimizer_s}
    return {"host": known.host.to_dict(), **times}


# The files: a config with the decision in its comments, and the evidence as JSON. #


def write_tuning(config: RunConfig, tuning: Tuning, *, out: Path, evidence: Path) -> None:
    """Write the config with the chosen plan, and the evidence as JSON.

    Raises:
        ConfigError: a file cannot be written.
    """
    write_text(out, tuned_text(config, tuning))
    write_text(evidence, json.dumps(tuning.to_dict(), indent=1, allow_nan=False) + "\n")


def tuned_text(config: RunConfig, tuning: Tuning) -> str:
    """Return the config with the chosen plan as YAML, the decision in comments before it. The default changes nothing."""
    header = [f"megabucket tune {__version__}, {datetime.now(timezone.utc).isoformat(timespec='seconds')}", *tuning.summary]
    comments = "".join(f"# {line}\n" for line in header)
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    choice = tuning.choice
    if choice.name != DEFAULT:
        kept = {
            name: value for name, value in data.get("ddp", {}).items() if name not in (*_CHOSEN, "use_distributed_optimizer")
        }
        chosen = choice.ddp.model_dump(mode="json", include=set(_CHOSEN), exclude_none=True)
        data |= {"mode": choice.mode.value, "ddp": kept | chosen}
    return comments + "\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
