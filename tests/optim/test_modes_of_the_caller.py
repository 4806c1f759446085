"""Every call that makes tensors, in each mode of torch that changes what is made: training goes on as without the mode.

Ordinary steps after the call must end with the bits of a run in which it was made in no mode.
"""

import contextlib
import functools
import inspect
import tempfile

import mode_calls
import pytest
import torch
from mode_calls import CALLS, CASES, PROCESS_MODES, THREAD_MODES, Run
from stand_ins import ScheduleFree

import megabucket as mb
from megabucket.testing import LoopbackWorld

SIZE = 2


def schedule_free(params):
    optimizer = ScheduleFree(params, weight_decay=0.01)
    optimizer.train()
    return optimizer


def switch(run):
    run.optimizer.eval()
    run.optimizer.train()


CALLS["train(), eval()"] = (functools.partial(mode_calls.prepared, make=schedule_free), switch, mode_calls.nothing)

# Where plain torch refuses as well.
REFUSED = {("DistributedDataParallel()", "inference"): mb.errors.UnsupportedParameterError}


def play(call, mode, case):
    world = LoopbackWorld(SIZE, timeout_s=20)
    with tempfile.TemporaryDirectory() as directory:
        runs = [Run(rank, case, directory, communicator=world.communicator(rank)) for rank in range(SIZE)]
        world.run(lambda rank: CALLS[call][0](runs[rank]))
        with PROCESS_MODES.get(mode, contextlib.nullcontext)():
            world.run(lambda rank: mode_calls.in_mode_of_thread(runs[rank], call, mode))
        return world.run(lambda rank: mode_calls.go_on(runs[rank], call))


@functools.cache
def played_in_no_mode(call, case):
    return play(call, "", case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [*THREAD_MODES, *PROCESS_MODES])
@pytest.mark.parametrize("call", CALLS)
def test_training_goes_on_as_if_the_call_had_been_made_in_no_mode(call, mode, case):
    if (call, mode) in REFUSED:
        with pytest.raises(REFUSED[call, mode]):
            play(call, mode, case)
        return

    found = play(call, mode, case)

    torch.testing.assert_close(found, played_in_no_mode(call, case), rtol=0, atol=0, equal_nan=True)


# These make no tensor, or are called by the wrapper itself.
OTHERS = {
    "DistributedDataParallel": {
        "abort_step", "follow_rebuilds", "forward", "grad_ready", "named_modules", "named_parameters", "no_sync",
        "note_written", "reading_params",
    },
    "DistributedOptimizer": {
        "after_rebuild", "before_rebuild", "clip_part", "load_grads", "memory", "norms_of", "prepare_step", "send_to_owners",
        "skip", "state_dicts", "step_part", "update", "why_not", "zero_grad_of_part",
    },
    "ChainedOptimizer": {"add_param_group"},
    "ShardedEMA": set(),
    "Checkpointer": {"close", "poll", "save_now"},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_every_public_call_is_tried(kind):
    methods = {name for name, of in vars(getattr(mb, kind)).items() if inspect.isfunction(of) and not name.startswith("_")}
    tried = "".join(inspect.getsource(part) for parts in CALLS.values() for part in parts if inspect.isfunction(part))

    assert OTHERS[kind] <= methods
    assert {name for name in methods - OTHERS[kind] if f".{name}(" not in tried} == set()
