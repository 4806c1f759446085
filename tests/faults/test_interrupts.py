"""Interrupts at some of the lines of a step, at all of them in ``python -m faults interrupts``; and alarms in processes."""

import pytest
import torch

from faults.interrupts import CALLS, COMBOS, FORM_COMBOS, OWNER_COMBOS, Call, Trainer, interrupt_at_lines, verdict_of
from faults.judge import Name, judge
from faults.kinds import fault_of, select
from faults.player import Play
from faults.processes import run_many
from megabucket.buffer import _ParamAndGradBucketGroup
from megabucket.checkpoint.capture import RunState, capture
from megabucket.checkpoint.checkpointer import Checkpointer
from megabucket.checkpoint.restore import restore
from megabucket.checkpoint.save import Save
from megabucket.ddp import DistributedDataParallel
from megabucket.ddp.step import GradSync
from megabucket.ddp.wrap import Wrapping
from megabucket.optim.distributed_optimizer import DistributedOptimizer
from megabucket.optim.owner_exchange import OwnerExchange, _call
from megabucket.optim.sharding import Sharding
from megabucket.optim.state_dict import unshard
from megabucket.optim.updates import Update
from megabucket.weights.export import _Export
from megabucket.weights.load import import_weights

EVERY, EVERY_OF_CALL, EVERY_OF_FORM = 101, 503, 401  # lines


def some_by_day(choices, by_day):
    """Give a test each of the choices, by day some of them: each takes seconds."""
    return [pytest.param(choice, marks=[] if choice in by_day else pytest.mark.nightly) for choice in choices]


@pytest.mark.slow
@pytest.mark.parametrize("combo", some_by_day(COMBOS, COMBOS[:2]), ids=str)
def test_an_interrupt_at_any_line_of_a_step_is_right_or_named_or_breaks_all_ranks(combo):
    result = interrupt_at_lines(combo, every=EVERY, first=1)

    assert result.failures == []
    assert set(result.counts) == {Name.RIGHT, Name.NAMED, Name.BROKEN}


@pytest.mark.slow
@pytest.mark.parametrize("combo", some_by_day(FORM_COMBOS, (FORM_COMBOS[0], FORM_COMBOS[-1])), ids=str)
def test_an_interrupt_at_any_line_of_a_step_of_another_form_is_right_or_named_or_breaks_all_ranks(combo):
    result = interrupt_at_lines(combo, every=EVERY_OF_FORM, first=7)

    assert result.failures == []
    assert result.counts.total() >= 5


CALLS_BY_DAY = ("detach", "DistributedOptimizer()", "ChainedOptimizer()", "rebuild", "state_dict", "finalize_grads")


@pytest.mark.slow
@pytest.mark.parametrize("call", some_by_day(CALLS, CALLS_BY_DAY))
def test_an_interrupt_at_any_line_of_a_call_is_right_or_named_or_breaks_all_ranks(call):
    result = interrupt_at_lines(CALLS[call].combo, every=EVERY_OF_CALL, first=2, call=CALLS[call])

    assert result.failures == []
    assert result.counts.total() >= 1


AROUND_OWNERS = [
    *(OwnerExchange.launch_grads, OwnerExchange.finish_grads, OwnerExchange.return_values, OwnerExchange._finish, _call),
    *(DistributedOptimizer._step, DistributedOptimizer.update, Sharding.store_values, Update.step, Update.call),
]
"""The functions between the verdict of all ranks and the gather, where weights have owners."""


@pytest.mark.parametrize(
    ("combo", "every"),
    [
        (OWNER_COMBOS[0], 11),
        *(pytest.param(combo, 1, marks=pytest.mark.nightly) for combo in OWNER_COMBOS),
    ],
    ids=str,
)
def test_an_interrupt_around_owners_is_right_or_named_or_breaks_all_ranks_which_then_recover(combo, every):
    result = interrupt_at_lines(combo, every=every, first=3, call=Call(combo=combo), inside=AROUND_OWNERS)

    assert result.failures == []
    assert result.counts[Name.BROKEN] >= 5


BETWEEN_EXCHANGES = {
    "check_replicas of replicas": [DistributedDataParallel.check_replicas],
    "export_weights, import_weights": [_Export.whole, _Export.exchange, import_weights],
    "rebuild": [
        *(DistributedDataParallel.rebuild, DistributedDataParallel._rebuild, torch.nn.Module.__setattr__),
        *(Wrapping.__init__, Wrapping.undo),
    ],
    "wrap": [Wrapping.__init__],
    "param_norms": [_ParamAndGradBucketGroup.finish_param_sync],
    "clip_grad_norm_": [DistributedOptimizer._take_grads, GradSync.finish, GradSync.agree, GradSync._conclude_whole],
    "unscale_grads": [DistributedOptimizer._take_grads, GradSync.finish, GradSync.agree, GradSync._conclude_whole],
    "save_checkpoint, load_checkpoint": [
        Checkpointer.save_now,
        Checkpointer.load,
        capture,
        RunState.__init__,
        Save.works,
        restore,
    ],
    "state_dict": [unshard],
}
"""The functions that make several exchanges in one call."""


@pytest.mark.parametrize("call", some_by_day(BETWEEN_EXCHANGES, ("wrap", "clip_grad_norm_")))
def test_an_interrupt_between_two_exchanges_of_a_call_is_right_or_named_or_breaks_all_ranks(call):
    result = interrupt_at_lines(CALLS[call].combo, call=CALLS[call], inside=BETWEEN_EXCHANGES[call])

    assert result.failures == []
    assert result.counts.total() >= 10


def test_an_interrupt_that_nobody_hears_of_is_found(monkeypatch):
    monkeypatch.setattr(GradSync, "fail", lambda *_: None)

    result = interrupt_at_lines(COMBOS[1], every=151)

    assert result.failures


def test_ranks_of_which_only_some_are_broken_are_wrong():
    ranks = [Trainer(rank, COMBOS[0], None, lambda _: None) for rank in range(2)]
    assert verdict_of(ranks) == (Name.RIGHT, "")

    ranks[1].is_broken = True
    assert verdict_of(ranks) == (Name.WRONG, "broken, but not on ranks [0]")

    ranks[0].is_broken = True
    assert verdict_of(ranks) == (Name.BROKEN, "")


ALARMS = ("interrupts/alarms/all-reduce/overlap/2", "interrupts/alarms-repeated/reduce-scatter/overlap/2")


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_day(ALARMS, ()))
def test_alarms_at_random_times_are_right_or_named_or_break_all_ranks(name):
    (run,) = run_many([Play(select(name))], time_limit_s=120.0)

    ((_, verdict),) = judge(run, fault_of)
    assert verdict.name is Name.RIGHT, verdict
