"""Calls in the caller's modes of torch, over gloo: back-ends keep memory from the first launch on."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import mode_calls
import pytest
import torch
from mode_calls import CALLS, PROCESS_MODES, Run
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


def result_of(rank: Rank, call: str, mode: str, case: str, directory: str) -> list[Any] | str:
    try:
        return play(rank, call, mode, case, f"{directory}/{call}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def differing(rank: Rank, mode: str, case: str, directories: list[str]) -> list[str]:
    """Return the calls after which training differs from that after the call in no mode, with what was raised."""
    found = []
    for call in LAUNCH:
        expected, result = (result_of(rank, call, *rest) for rest in (("", case, directories[0]), (mode, case, directories[1])))
        if isinstance(result, str) or not all(map(equal, result, expected)):
            found.append(f"{call}: {result}")
    return found


def equal(value: Any, expected: Any) -> bool:
    return torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


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
