"""Calls in the caller's modes of torch, over gloo: back-ends keep memory from the first launch on."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import mode_calls
import pytest
import torch
from mode_calls import CALLS, CASES, PROCESS_MODES, THREAD_MODES, Run
from pool import Rank

import megabucket as mb

pytestmark = pytest.mark.dist

LAUNCH = (
    "DistributedDataParallel()",
    "DistributedOptimizer()",
    "the first step()",
    "the first backward()",
    "the first finish_grad_sync()",
    "an evaluation",
    "load_state_dict()",
    "load_checkpoint()",
    "rebuild()",
)
"""Calls that launch something for the first time."""

def play(rank: Rank, call: str, mode: str, case: str, directory: str) -> list[Any]:
    run = Run(rank.index, case, directory, process_group=rank.group)
    CALLS[call][0](run)
    with PROCESS_MODES.get(mode, contextlib.nullcontext)():
        mode_calls.in_mode_of_thread(run, call, mode)
    found = mode_calls.go_on(run, call)
    run.ddp.detach()
    return found


def differing(rank: Rank, mode: str, case: str, directories: list[str]) -> list[str]:
    """Return the calls after which training differs from that after the call in no mode, with what was raised."""
    found = []
    for call in LAUNCH:
        results: list[Any] = []
        for used, directory in (("", directories[0]), (mode, directories[1])):
            try:
                results.append(play(rank, call, used, case, f"{directory}/{call}"))
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
        try:
            torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)
        except (AssertionError, TypeError) as error:
            found.append(f"{call}: {results[1] if isinstance(results[1], str) else error}")
    return found


@pytest.mark.parametrize(
    ("mode", "case", "ranks"),
    [
        ("inference", "overlapped gather", 3),
        ("inference", "reduce-scatter, bfloat16", 2),
        pytest.param("inference", "all-reduce", 3, marks=pytest.mark.nightly),
        pytest.param("inference", "reduce-scatter, bfloat16", 3, marks=pytest.mark.nightly),
        pytest.param("default device", "reduce-scatter, bfloat16", 2, marks=pytest.mark.nightly),
        pytest.param("float64", "reduce-scatter, bfloat16", 2, marks=pytest.mark.nightly),
    ],
)
def test_training_goes_on_as_if_the_call_had_been_made_in_no_mode(pool, mode, case, ranks):
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        by_rank = pool.run(differing, mode, case, [before, after], ranks=ranks)

    refused = f"DistributedDataParallel(): {mb.errors.UnsupportedParameterError.__name__}"
    for found in by_rank:
        assert [text for text in found if not (mode == "inference" and text.startswith(refused))] == []
