"""The program behind ``megabucket tune``: calibrate, profile, predict, run the best few for real, decide.

Every process of the run calls it and all of them come to the same decision: what decides is exchanged first. Candidates run in
the training program's own steps, in turn and in changing order, so that a slow moment of the machine hits all of them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from megabucket.comm import discover_communicator
from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec
from megabucket.measure.calibrate import CalibrationPlan, measure_link
from megabucket.measure.host import host_costs, meeting, optimizer_s, time_phases
from megabucket.measure.out_file import why_not_writable
from megabucket.measure.pipelined import pipelined_link
from megabucket.measure.profile import WorkloadProfile, choose_rank
from megabucket.measure.profile_training import ProfilePlan, profile_task
from megabucket.optim import DistributedOptimizer
from megabucket.planning.architecture import param_specs
from megabucket.planning.links import Link
from megabucket.planning.run_config import RunConfig
from megabucket.planning.simulate import FENCE, Mode
from megabucket.planning.tune import (
    SIZE_FIELDS,
    Candidate,
    Decision,
    Measured,
    decide,
    find_candidates,
    in_mode,
    mode_of,
    pick,
)
from megabucket.training.bytegpt import next_byte_loss
from megabucket.training.launch import Launch, joined_ranks
from megabucket.training.optimizer import make_optimizer
from megabucket.training.task import Task, make_task, trainable_model

_CUTTING: Final = frozenset({*SIZE_FIELDS, "bucket_order", "bucket_groups"})
_WARM_STEPS: Final = 2
"""Steps before those that count in each turn: the first one shows what forward needs, the second fills the pipeline."""


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


def tune_training(
    config: RunConfig,
    plan: TunePlan,
    *,
    launch: Launch,
    outputs: Sequence[Path] = (),
    note: Callable[[str], None] = lambda _: None,
    use: Callable[[Tuning], str] = lambda _: "",
) -> Tuning:
    """Tune the ``ddp`` section of a config on the ranks of this run. Every process calls it.

    Args:
        outputs: files that ``use`` will write; looked at before anything is measured.
        note: called on the first rank with what happens next.
        use: called on the first rank with the result, before any rank leaves; returns why it could not be used, or nothing.

    Raises:
        ConfigError: one rank only, no model that can be trained, a config that cannot be honoured, or what ``use`` returned.
        CorpusError: the corpus cannot be read, or the ranks read different bytes.
    """
    if launch.num_ranks == 1:
        raise ConfigError(
            "one rank sends nothing, so there is nothing to tune; start more with torchrun --nproc-per-node 2 -m megabucket "
            "tune -c CONFIG"
        )
    model = trainable_model(config)
    say = note if launch.rank == 0 else _silent
    with joined_ranks(launch, config.fabric) as ranks:
        problems = ranks.gather([problem for path in outputs if ranks.rank == 0 and (problem := why_not_writable(path))])[0]
        if problems:
            raise ConfigError(problems[0])
        start_s = time.monotonic()
        program = _Program(make_task(config, model, ranks))
        tuning = program.tune(plan, until_s=start_s + plan.max_s, say=say)
        failure = ranks.gather(use(tuning) if ranks.rank == 0 else "")[0]
        if failure:
            raise ConfigError(failure)
    return tuning


def _silent(_: str) -> None:
    pass


class _Program:
    """The training program on the ranks, with one wrapper for each kind of config that a rebuild cannot change."""

    def __init__(self, task: Task) -> None:
        self._task, self._ranks = task, task.ranks
        self._specs: tuple[ParamSpec, ...] = tuple(param_specs(task.model))
        self._trainees: dict[str, _Trainee] = {}

    def tune(self, plan: TunePlan, *, until_s: float, say: Callable[[str], None]) -> Tuning:
        """Measure, search, run, decide."""
        default = self._task.config.ddp
        modes = tuple(Mode) if plan.all_modes else (mode_of(default),)
        say("calibrating the link")
        link = self._measure_link()
        measured = {}
        for mode in modes:
            say(f"profiling, {mode.value}")
            measured[mode] = self._measure_mode(in_mode(default, mode), link)
        candidates = find_candidates(self._specs, default, measured, link, num_ranks=self._ranks.num_ranks)
        finalists = pick(candidates, plan.num_candidates)
        say(f"{len(candidates)} candidates predicted; running {len(finalists)} of them")
        seconds = self._run(finalists, plan, until_s=until_s, say=say)
        for trainee in self._trainees.values():
            trainee.ddp.detach()
        return Tuning(candidates, seconds, decide(seconds), self._facts(measured))

    def _measure_link(self) -> Link:
        num_bytes = sum(spec.numel for spec in self._specs) * 4
        kinds = CalibrationPlan().kinds
        what = CalibrationPlan(kinds=kinds, max_bytes=max(num_bytes, 2**14), repetitions=5)
        calibration = measure_link(what, self._ranks, fabric=self._task.config.fabric)
        with closing(discover_communicator(None)) as communicator:
            lane = pipelined_link(calibration, communicator, device=self._ranks.device)
        alone_s, in_flight_s = (link.collective_s(*FENCE, self._ranks.num_ranks) for link in (calibration.link, lane))
        self._overhead_s = alone_s - in_flight_s
        return lane

    def _measure_mode(self, ddp: DistributedDataParallelConfig, link: Link) -> Measured:
        task = replace(self._task, config=self._task.config.model_copy(update={"ddp": ddp}))
        own = profile_task(task, ProfilePlan(num_steps=6, num_warmup_steps=2), counts_launches=False)
        profiles = [WorkloadProfile.from_dict(data) for data in self._ranks.gather(own.to_dict())]
        workload = choose_rank(profiles, "median").workload
        base = ddp.model_copy(update=dict.fromkeys((*SIZE_FIELDS, "bucket_order")))
        trainee = self._trainee_of(base)
        phases = []
        for numel in (sum(spec.numel for spec in self._specs), 1):
            trainee.cut(base.model_copy(update={"bucket_size": numel}))
            phases.append(time_phases(trainee.ddp, trainee.optimizer, partial(trainee.backward, 0)))
        few, many = phases
        num_ranks, is_sharded = self._ranks.num_ranks, ddp.use_distributed_optimizer
        host = host_costs(few, many, link, num_ranks=num_ranks, is_sharded=is_sharded, wake_s=self._overhead_s)
        update_s = optimizer_s(few, many, host, link, num_ranks=num_ranks, is_sharded=is_sharded)
        return Measured(replace(workload, optimizer_s=update_s), host)

    def _run(
        self, finalists: Sequence[Candidate], plan: TunePlan, *, until_s: float, say: Callable[[str], None]
    ) -> dict[str, tuple[float, ...]]:
        own: dict[str, list[float]] = {each.name: [] for each in finalists}
        for number in range(plan.num_rounds):
            # All ranks go by the clock of the first one.
            if number and self._ranks.gather(time.monotonic() > until_s)[0]:
                break
            say(f"round {number + 1}/{plan.num_rounds}")
            for each in random.Random(number).sample(finalists, len(finalists)):  # noqa: S311 - alike on all ranks
                own[each.name].append(self._trainee_of(each.ddp).turn(each.ddp, plan.steps_per_turn))
        everybody = self._ranks.gather(own)
        return {name: tuple(max(times) for times in zip(*(one[name] for one in everybody), strict=True)) for name in own}

    def _trainee_of(self, ddp: DistributedDataParallelConfig) -> _Trainee:
        key = ddp.model_dump_json(exclude=set(_CUTTING))
        if key not in self._trainees:
            self._trainees[key] = _Trainee(self._task, ddp)
        return self._trainees[key]

    def _facts(self, measured: Mapping[Mode, Measured]) -> dict[str, Any]:
        ranks = self._ranks
        return {
            "num_ranks": ranks.num_ranks,
            "backend": ranks.backend,
            "fabric": None if self._task.config.fabric is None else self._task.config.fabric.model_dump(),
            "collective_overhead_s": self._overhead_s,
            "modes": {
                mode.value: {
                    "host": known.host.to_dict(),
                    "forward_s": known.workload.forward_s,
                    "backward_s": known.workload.backward_s,
                    "optimizer_s": known.workload.optimizer_s,
                }
                for mode, known in measured.items()
            },
        }


class _Trainee:
    """A wrapped model with its optimizer, running the steps of the training program."""

    def __init__(self, task: Task, ddp: DistributedDataParallelConfig) -> None:
        # What would lengthen single turns and tells nothing about the plan.
        self._quiet = {"init_sync": False}
        self.ddp = DistributedDataParallel(task.build_model(), ddp.model_copy(update=self._quiet))
        torch_optimizer = make_optimizer(task.config.optimizer, self.ddp.parameters())
        self.optimizer = DistributedOptimizer(torch_optimizer, self.ddp, clip_grad=task.config.optimizer.clip_grad)
        self._task = task
        self._meet = meeting(self.ddp.communicator, device=task.ranks.device)

    def cut(self, ddp: DistributedDataParallelConfig) -> None:
        """Take another plan."""
        self.ddp.rebuild(ddp.model_copy(update=self._quiet))

    def turn(self, ddp: DistributedDataParallelConfig, num_steps: int) -> float:
        """Return the mean seconds of ``num_steps`` steps in the steady state with this plan."""
        self.cut(ddp)
        self._meet()
        for step in range(_WARM_STEPS):
            self.step(step)
        start_s = time.perf_counter()
        for step in range(num_steps):
            self.step(_WARM_STEPS + step)
        seconds = (time.perf_counter() - start_s) / num_steps
        self.ddp.finish_param_sync()
        return seconds

    def step(self, number: int) -> None:
        """Take one training step."""
        microbatches = self._task.microbatches(number)
        with self.ddp.step():
            for inputs, targets in microbatches[:-1]:
                with self.ddp.no_sync():
                    (next_byte_loss(self.ddp, inputs, targets) / len(microbatches)).backward()
            (next_byte_loss(self.ddp, *microbatches[-1]) / len(microbatches)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, number: int) -> None:
        """Run forward and backward of one microbatch."""
        next_byte_loss(self.ddp, *self._task.microbatches(number)[0]).backward()
