"""Five small steps of two ranks, the third of them odd: what each rank does, and what must come of it.

Ranks are threads of a ``LoopbackWorld``, which finds every write in flight and every collective that does not match. Gradients
are whole numbers, so each output of a forward is known from plain Python numbers, and with it every weight.
"""

import enum
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megabucket.config import DistributedDataParallelConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.step import StepState
from megabucket.errors import (
    CallMismatchError,
    CollectiveError,
    ConfigError,
    HyperparameterMismatchError,
    InvariantError,
    LateGradientError,
    MicrobatchMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    PhaseError,
    ReplicasDivergedError,
    ScheduleMismatchError,
    StepMismatchError,
    StorageMovedError,
    UnreducedGradientsError,
    UnusedParameterError,
    WrapperBrokenError,
)
from megabucket.optim import DistributedOptimizer
from megabucket.testing import LoopbackWorld
from megabucket.testing.loopback import InFlightWriteError, MismatchedCollectiveError

NUM_RANKS, NUM_STEPS, EPISODE = 2, 5, 2
ODD_RANK = 1
NUMEL, LEARNING_RATE = 100, 0.5
NAMES = ("p0", "p1", "p2", "p3")

ALL_REDUCE = {"use_distributed_optimizer": False, "skipped_forwards": "error"}
EXPLICIT = {**ALL_REDUCE, "finish": "explicit"}
SHARDED = {"use_distributed_optimizer": True, "skipped_forwards": "error"}
SHARDED_EXPLICIT = {**SHARDED, "finish": "explicit"}
OVERLAPS = {"overlap_grad_reduce": True, "bucket_size": 1, "bucket_groups": "per_bucket"}

Microbatch = dict[str, float]
"""The gradient of each parameter in one backward, the first one of the forward first."""


class Verdict(enum.Enum):
    """What came of a step that is not as it must be."""

    SILENT = "silent"  # nothing was raised where something was wrong, or numbers are wrong
    WRONG = "wrong"  # an error, but another one than expected, or not the same on all ranks
    HUNG = "hung"  # ranks wait for collectives that never come, or would have mixed different ones


@dataclass(frozen=True)
class Judgement:
    """The first step that is not as it must be."""

    step: int
    verdict: Verdict
    error: str  # class of the error that was seen, empty if there was none
    text: str


class Boom(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise KeyError("boom")


class Model(torch.nn.Module):
    """Named vectors. The gradient of each is its factor, in every element."""

    def __init__(self, dtype):
        super().__init__()
        self.fails_in = ""
        for name in NAMES:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(NUMEL, dtype=dtype)))

    def forward(self, factors):
        if self.fails_in == "forward":
            raise KeyError("boom")
        terms = []
        for name, factor in factors.items():
            term = (getattr(self, name).float() * factor).sum()
            is_last_in_backward = not terms  # when it fails, the other gradients have come
            terms.append(Boom.apply(term) if is_last_in_backward and self.fails_in == "backward" else term)
        return torch.stack(terms).sum()


def plan_of(rank, number):
    """The microbatches of a healthy step. The odd rank goes through the model the other way round."""
    names = NAMES[::-1] if rank == ODD_RANK else NAMES
    return [{name: (rank + 1 + 2 * index) * (int(name[1]) + 1) + number for name in names} for index in range(2)]


class Player:
    """One rank: a wrapped model, its optimizer, what it does, and what is odd about it."""

    def __init__(self, rank, scenario, communicator, meet):
        self.rank, self.is_odd, self.meet = rank, rank == ODD_RANK, meet
        self.scenario, self.number = scenario, 0
        self.found = []
        """What is wrong although nothing was raised."""
        self.module = Model(scenario.dtype)
        config = DistributedDataParallelConfig(**scenario.switches)
        self.ddp = DistributedDataParallel(self.module, config, communicator=communicator)
        self.is_explicit = config.finish == "explicit"
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.optimizer = self.sgd
        if config.use_distributed_optimizer:
            self.optimizer = DistributedOptimizer(self.sgd, self.ddp, clip_grad=scenario.clip_grad)
        self.expected = dict.fromkeys(NAMES, 1.0)

    @property
    def plan(self):
        return self.plan_of(self.rank)

    def plan_of(self, rank):
        is_episode = self.number == EPISODE or (self.scenario.repeats and self.number > EPISODE)
        plan = plan_of(rank, self.number)
        return self.scenario.plan(rank, plan) if is_episode else plan

    def begin(self):
        self.ddp.step_number = self.number
        self.ddp.zero_grad()

    def forward(self, factors):
        loss = self.module(factors)
        expected = sum(NUMEL * self.expected[name] * factor for name, factor in factors.items())
        if not (math.isclose(loss.item(), expected, rel_tol=1e-5) or math.isnan(expected)):
            self.found.append(f"the output of a forward is {loss.item():g} and should be {expected:g}")
        return loss

    def microbatches(self, *, num_last=1):
        """Run all backwards; the last ones outside of ``no_sync``."""
        for index, factors in enumerate(self.plan):
            if index < len(self.plan) - num_last:
                with self.ddp.no_sync():
                    self.forward(factors).backward()
            else:
                self.forward(factors).backward()

    def update(self):
        if self.is_explicit:
            self.ddp.finish_grad_sync()
        return self.optimizer.step()

    def step(self):
        self.begin()
        self.microbatches()
        return self.update()

    def must_raise(self, kind, act):
        try:
            act()
        except kind:
            return
        self.found.append(f"raised nothing, expected {kind.__name__}")

    def note_right_step(self):
        """Do in plain numbers what a step does."""
        plans = [self.plan_of(rank) for rank in range(NUM_RANKS)]
        grads = {name: sum(micro.get(name, 0) for plan in plans for micro in plan) / NUM_RANKS for name in NAMES}
        norm = math.sqrt(sum(NUMEL * grad * grad for grad in grads.values()))
        if not math.isfinite(norm):
            return  # left out on all ranks
        clip = self.scenario.clip_grad
        factor = min(clip / norm, 1.0) if clip else 1.0
        self.expected = {name: value - LEARNING_RATE * factor * grads[name] for name, value in self.expected.items()}

    def look(self):
        """Compare all weights at the end."""
        self.ddp.finish_param_sync()
        for name, param in self.module.named_parameters():
            values, expected = set(param.tolist()), self.expected[name]
            if not all(math.isclose(value, expected, rel_tol=1e-5) for value in values):
                self.found.append(f"{name} is {min(values):g} and should be {expected:g}")


# What is odd about the third step: on all ranks, or on the odd one only #


def healthy(player):
    player.step()


def nested_no_sync(player):
    player.begin()
    with player.ddp.no_sync():
        with player.ddp.no_sync():
            player.forward(player.plan[0]).backward()
        player.forward(player.plan[1]).backward()
    player.forward(player.plan[2]).backward()
    player.update()


def one_more_microbatch(player):
    player.begin()
    if player.is_odd:
        with player.ddp.no_sync():
            player.forward(player.plan[0]).backward()
    player.microbatches()
    player.update()


def start_early(player):
    player.begin()
    with player.ddp.no_sync():
        player.forward(player.plan[0]).backward()
    if player.is_odd:
        player.ddp.start_grad_sync()
        player.forward(player.plan[1]).backward()
        player.meet()
    else:
        player.meet()  # what the odd rank has sent is in flight until this one sends its own
        player.forward(player.plan[1]).backward()
    player.update()


def two_last_backwards(player):
    player.begin()
    player.microbatches(num_last=2)
    player.update()


def fail_in(place):
    def act(player):
        with player.ddp.step():
            player.begin()
            player.module.fails_in = place if player.is_odd else ""
            try:
                player.microbatches()
            finally:
                player.module.fails_in = ""
            player.update()

    return act


def fail_without_a_block(player):
    player.begin()
    player.module.fails_in = "backward" if player.is_odd else ""
    try:
        player.microbatches()
    except KeyError:
        if player.ddp.last_error is not None:
            raise player.ddp.last_error from None
        return  # and the loop goes on with the next batch
    finally:
        player.module.fails_in = ""
    player.update()


def catch_in_the_block(player):
    with player.ddp.step():
        player.begin()
        if player.is_odd:
            player.module.fails_in = "forward"
            try:
                player.microbatches()
            except KeyError:
                player.module.fails_in = ""
        player.microbatches()
        player.update()


def abort(player):
    player.begin()
    player.microbatches()
    if player.is_odd:
        player.ddp.abort_step("no good")
        raise player.ddp.last_error
    player.update()


def abort_in_time(player):
    """Before the last backward, which finishes the step."""
    player.begin()
    with player.ddp.no_sync():
        player.forward(player.plan[0]).backward()
    if player.is_odd:
        player.ddp.abort_step("no good")
        raise player.ddp.last_error
    player.forward(player.plan[1]).backward()
    player.update()


def abort_and_step_all_the_same(player):
    try:
        abort_in_time(player)
    except PeerFailedError:
        player.must_raise(PhaseError, player.optimizer.step)
        raise


def abort_after_finish(player):
    player.begin()
    player.microbatches()
    player.ddp.finish_grad_sync()
    if player.is_odd:
        player.ddp.abort_step("no good")
        raise player.ddp.last_error
    player.optimizer.step()


def clip_too_early(player):
    player.begin()
    player.microbatches()
    player.must_raise(PhaseError, lambda: torch.nn.utils.clip_grad_norm_(player.module.parameters(), 1.0))
    player.update()


def clip_one_shard(player):
    player.begin()
    player.microbatches()
    player.ddp.finish_grad_sync()
    grads = [param.grad for param in player.module.parameters()]
    if any(type(grad) is torch.Tensor for grad in grads):
        player.found.append("param.grad shows a gradient of which this rank has one shard")
    player.optimizer.step()


def step_unfinished(player):
    player.begin()
    player.microbatches()
    player.must_raise(UnreducedGradientsError, player.optimizer.step)
    player.update()


def save_in_the_middle(player):
    player.begin()
    player.microbatches()
    player.must_raise(PhaseError, player.optimizer.state_dict)
    player.update()


def send_a_bucket_again(player):
    player.begin()
    player.microbatches()
    player.ddp.finish_grad_sync()
    player.must_raise(PhaseError, player.ddp.bucket_groups[0].start_grad_sync)
    player.meet()
    player.optimizer.step()


def go_where_no_way_leads(player):
    player.begin()
    player.must_raise(InvariantError, lambda: player.ddp.sync.enter(StepState.PUBLISHED))
    player.microbatches()
    player.update()


def move_a_parameter(player):
    views = {param: param.data for param in player.module.parameters()}
    if player.is_odd:
        player.module.p1.data = player.module.p1.data.clone()
    try:
        player.step()
    finally:
        for param, view in views.items():
            param.data = view


def clear_instead_of_step(player):
    player.begin()
    player.microbatches()
    player.ddp.zero_grad() if player.is_odd else player.update()


def leave_the_update_out(player):
    player.begin()
    player.microbatches()
    if not player.is_odd:
        player.update()


def one_more_forward(player):
    player.begin()
    if player.is_odd:
        player.forward(player.plan[0])
    player.microbatches()
    player.update()


def another_step_number(player):
    player.begin()
    if player.is_odd:
        player.ddp.step_number = 99
    player.microbatches()
    player.update()


def finish_first(player):
    player.begin()
    player.microbatches()
    if player.is_odd:
        player.ddp.finish_grad_sync()
    player.update()


def force_on_one_rank(player):
    player.begin()
    player.microbatches()
    player.ddp.finish_grad_sync(force_all_reduce=player.is_odd)
    player.optimizer.step()


def leave_the_clearing_out(player):
    if not player.is_odd:
        player.begin()
    else:
        player.ddp.step_number = player.number
    player.microbatches()
    player.update()


def load_on_one_rank(player):
    if player.is_odd:
        player.module.load_state_dict(player.module.state_dict())
    player.step()


def another_learning_rate(player):
    groups = player.sgd.param_groups
    player.begin()
    player.microbatches()
    groups[0]["lr"] *= 2 if player.is_odd else 1
    try:
        player.update()
    finally:
        groups[0]["lr"] = LEARNING_RATE


def no_learning_rate(player):
    groups = player.sgd.param_groups
    player.begin()
    player.microbatches()
    if not player.is_odd:
        player.update()
        return
    groups[0]["lr"] = math.nan
    player.must_raise(ConfigError, player.update)
    groups[0]["lr"] = LEARNING_RATE
    raise player.ddp.last_error or AssertionError(*player.found)


def scale_on_one_rank(player):
    player.begin()
    player.microbatches()
    player.ddp.finish_grad_sync()
    if player.is_odd:
        player.ddp.scale_gradients(2.0)
    player.optimizer.step()


def call_on_one_rank(player):
    player.ddp.check_replicas() if player.is_odd else player.step()


def interrupt_behind_the_fence(player):
    """What the other rank has of this step depends on the clock; in the next one all ranks are broken."""

    def interrupt(*, waits=True):
        raise KeyboardInterrupt

    if player.is_odd:
        player.ddp.sync.groups[0].finish_grad_sync = interrupt
    try:
        player.step()
    except (KeyboardInterrupt, WrapperBrokenError):
        if player.is_odd:
            player.must_raise(WrapperBrokenError, player.ddp.zero_grad)
    finally:
        player.ddp.sync.groups[0].__dict__.pop("finish_grad_sync", None)
        player.meet()


# What the third step is made of #


def as_it_is(_, plan):
    return plan


def of_three(_, plan):
    return [*plan, plan[0]]


def without_p1(_, plan):
    return [{name: factor for name, factor in micro.items() if name != "p1"} for micro in plan]


def without_p1_on_one_rank(rank, plan):
    return without_p1(rank, plan) if rank == ODD_RANK else plan


def all_are(value, *, on_all=False):
    def change(rank, plan):
        return [dict.fromkeys(micro, value) for micro in plan] if on_all or rank == ODD_RANK else plan

    return change


@dataclass(frozen=True)
class Scenario:
    """Two healthy steps, an odd one, two healthy ones, and what all ranks must raise, if anything."""

    name: str
    act: Callable[[Player], object] = healthy
    switches: dict = field(default_factory=dict)
    error: type[Exception] | None = None
    comes_late: bool = False
    """Whether the error comes at the end of the next step, where nothing can be done about what ranks hold any more."""
    plan: Callable[[int, list[Microbatch]], list[Microbatch]] = as_it_is
    repeats: bool = False
    """Whether all steps from the third on are odd in the same way; only the third is an error."""
    completion: str = "immediate"
    dtype: torch.dtype = torch.float32
    clip_grad: float = 0.0
    fields: dict = field(default_factory=dict)
    """What the error must hold."""

    def run(self):
        """Return what is wrong about the first step that is not as it must be; ``None`` if all are."""
        world = LoopbackWorld(NUM_RANKS, completion=self.completion, timeout_s=4)
        barrier = threading.Barrier(NUM_RANKS, timeout=4)
        raised = [[] for _ in range(NUM_RANKS)]
        found = [[] for _ in range(NUM_RANKS)]

        def play(rank):
            player = Player(rank, self, world.communicator(rank), barrier.wait)
            for player.number in range(NUM_STEPS):
                error = self._play_step(player)
                raised[rank].append(error)
                found[rank].append(player.found)
                player.found = []
                if self._is_last(player.number) or self._judge_error(error, player.number) is not None:
                    return
                if error is None:
                    player.note_right_step()
            player.look()
            found[rank][-1] += player.found

        world.run(play)
        return next(filter(None, (self._judge(number, raised, found) for number in range(NUM_STEPS))), None)

    def _play_step(self, player):
        is_odd = player.number == EPISODE or (self.repeats and player.number > EPISODE)
        try:
            self.act(player) if is_odd else player.step()
        except Exception as error:
            return error
        return None

    def _is_last(self, number):
        return self.comes_late and number == EPISODE + 1

    def _expected(self, number):
        return self.error if number == EPISODE + self.comes_late else None

    def _judge_error(self, error, number):
        """Return why this is not what a rank must raise."""
        expected = self._expected(number)
        if error is None:
            return None if expected is None else f"raised nothing, expected {expected.__name__}"
        if expected is None or type(error) is not expected:
            return f"{error}"
        odd = {name: getattr(error, name) for name, value in self.fields.items() if getattr(error, name) != value}
        return f"{odd} in place of {self.fields}: {error}" if odd else None

    def _judge(self, number, raised, found):
        errors = [errors[number] for errors in raised if number < len(errors)]
        if not errors:
            return None
        reasons = [self._judge_error(error, number) for error in errors]
        for kind in (InFlightWriteError, MismatchedCollectiveError, CollectiveError):
            for error in errors:
                if isinstance(error, kind):
                    verdict = Verdict.SILENT if kind is InFlightWriteError else Verdict.HUNG
                    return Judgement(number, verdict, type(error).__name__, str(error))
        wrong = [pair for pair in zip(errors, reasons, strict=True) if None not in pair]
        if wrong:
            error, reason = min(wrong, key=lambda pair: isinstance(pair[0], WrapperBrokenError))  # that is only an echo
            return Judgement(number, Verdict.WRONG, type(error).__name__, reason)
        silent = [reason for reason in reasons if reason is not None]
        if not self._is_last(number):  # where replicas differ already
            silent += [text for texts in found if number < len(texts) for text in texts[number]]
        if silent:
            return Judgement(number, Verdict.SILENT, "", silent[0])
        if len(set(map(str, errors))) > 1:
            return Judgement(number, Verdict.WRONG, type(errors[0]).__name__, f"texts differ: {list(map(str, errors))}")
        return None


RIGHT = [
    Scenario("healthy", healthy, {**ALL_REDUCE, **OVERLAPS}),
    Scenario("healthy, sharded", healthy, {**SHARDED, **OVERLAPS, "overlap_param_gather": True}),
    Scenario("healthy, nothing is there before it is waited for", healthy, SHARDED, completion="manual"),
    Scenario("clipped", healthy, SHARDED, clip_grad=10.0),
    Scenario("nested no_sync", nested_no_sync, {**SHARDED, **OVERLAPS}, plan=of_three),
    Scenario("unused on all ranks", healthy, {**ALL_REDUCE, "unused_parameters": "zero"}, plan=without_p1),
    Scenario("huge but finite", healthy, SHARDED, plan=all_are(1e25)),
    Scenario("nan is skipped", healthy, {**ALL_REDUCE, "nonfinite_gradients": "skip_step"}, plan=all_are(math.nan)),
    Scenario("clip too early", clip_too_early, {**SHARDED, "overlap_grad_reduce": False}),
    Scenario("clip one shard", clip_one_shard, SHARDED_EXPLICIT),
    Scenario("step without a sync", step_unfinished, EXPLICIT),
    Scenario("save in the middle", save_in_the_middle, SHARDED),
    Scenario("bucket sent again", send_a_bucket_again, EXPLICIT),
    Scenario("no way from here", go_where_no_way_leads, ALL_REDUCE),
]
NAMED = [
    Scenario("start early", start_early, EXPLICIT, LateGradientError, fields={"rank": ODD_RANK}),
    Scenario("two last backwards", two_last_backwards, {**SHARDED, **OVERLAPS}, LateGradientError, repeats=True),
    Scenario("exception in forward", fail_in("forward"), ALL_REDUCE, PeerFailedError, fields={"rank": ODD_RANK}),
    Scenario(
        "exception in backward", fail_in("backward"), {**SHARDED, **OVERLAPS}, PeerFailedError, fields={"phase": "backward"}
    ),
    Scenario("exception without a block", fail_without_a_block, SHARDED, PeerFailedError),
    Scenario("exception that is caught", catch_in_the_block, ALL_REDUCE, PeerFailedError),
    Scenario("microbatch more", one_more_microbatch, ALL_REDUCE, MicrobatchMismatchError),
    Scenario("unused", healthy, SHARDED, UnusedParameterError, plan=without_p1_on_one_rank, fields={"ranks": (ODD_RANK,)}),
    Scenario("nan or inf", healthy, ALL_REDUCE, NonFiniteGradientError, plan=all_are(math.nan), fields={"rank": ODD_RANK}),
    Scenario(
        "sum that overflows",
        healthy,
        {**ALL_REDUCE, "grad_reduce_in_fp32": False},
        NonFiniteGradientError,
        plan=all_are(20_000.0, on_all=True),  # twice on each of two ranks: 80,000, and a float16 holds 65,504
        dtype=torch.float16,
    ),
    Scenario("parameter moved", move_a_parameter, SHARDED, StorageMovedError),
    Scenario("abort", abort, SHARDED, PeerFailedError, fields={"rank": ODD_RANK}),
    Scenario("abort and step", abort_and_step_all_the_same, ALL_REDUCE, PeerFailedError),
    Scenario("abort before the step", abort_after_finish, SHARDED_EXPLICIT, PeerFailedError),
    Scenario("zero instead of step", clear_instead_of_step, EXPLICIT, StepMismatchError),
    Scenario("forward more", one_more_forward, ALL_REDUCE, StepMismatchError),
    Scenario("other step number", another_step_number, SHARDED, StepMismatchError),
    Scenario("finish first", finish_first, SHARDED, ScheduleMismatchError),
    Scenario("force on one rank", force_on_one_rank, SHARDED_EXPLICIT, ScheduleMismatchError),
    Scenario("zero left out", leave_the_clearing_out, ALL_REDUCE, StepMismatchError),
    Scenario("other learning rate", another_learning_rate, SHARDED_EXPLICIT, HyperparameterMismatchError),
    Scenario("learning rate of nan", no_learning_rate, SHARDED, PeerFailedError, fields={"rank": ODD_RANK}),
    Scenario("call on one rank", call_on_one_rank, ALL_REDUCE, CallMismatchError),
    Scenario("weights loaded", load_on_one_rank, ALL_REDUCE, ReplicasDivergedError),
    Scenario("update left out", leave_the_update_out, ALL_REDUCE, ReplicasDivergedError, comes_late=True),
    Scenario("scaled on one rank", scale_on_one_rank, EXPLICIT, ReplicasDivergedError, comes_late=True),
    Scenario("interrupt behind the fence", interrupt_behind_the_fence, ALL_REDUCE, WrapperBrokenError, comes_late=True),
]
SCENARIOS = {scenario.name: scenario for scenario in (*RIGHT, *NAMED)}
