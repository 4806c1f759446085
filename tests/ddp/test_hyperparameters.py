"""Which numbers of an optimizer are compared, and how they are told."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megabucket.ddp.report import number_of, read_hyperparameters, texts_of


def groups(**values):
    return [{"params": [], **values}]


def test_every_number_of_every_group_is_read_in_the_order_of_its_name():
    found = read_hyperparameters([{"lr": 0.5, "betas": (0.9, 0.99), "params": []}, {"momentum": 1, "lr": 0.25}])

    assert found == (
        ("betas of group 0", (0.9, 0.99)),
        ("lr of group 0", 0.5),
        ("lr of group 1", 0.25),
        ("momentum of group 1", 1.0),
    )


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), ["dampening", "lr", "maximize", "momentum", "nesterov", "weight_decay"]),
        (
            lambda p: torch.optim.AdamW(p, lr=0.1),
            ["amsgrad", "betas", "decoupled_weight_decay", "eps", "lr", "maximize", "weight_decay"],
        ),
    ],
    ids=["SGD", "AdamW"],
)
def test_of_an_optimizer_of_torch_all_that_decides_the_update_is_read(build, names):
    optimizer = build([torch.nn.Parameter(torch.zeros(1))])

    assert [name for name, _ in read_hyperparameters(optimizer.param_groups)] == [f"{name} of group 0" for name in names]


def test_how_the_update_is_computed_and_what_is_no_number_is_left_out():
    ignored = dict.fromkeys(["foreach", "fused", "capturable", "differentiable", "initial_lr"], 1)

    assert read_hyperparameters(groups(**ignored, name="head", schedule=None, lr=1.0)) == (("lr of group 0", 1.0),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3]), 3.0),
        ([1, torch.tensor(2.0)], (1.0, 2.0)),
        (math.inf, math.inf),
        (2**53, 2.0**53),
        (2**53 + 1, "9007199254740993"),
        (10**400, "1" + "0" * 400),
        (torch.zeros(2), None),
        (torch.tensor(1j), None),
        (torch.tensor(1.0, device="meta"), None),
        ("0.5", None),
        (None, None),
    ],
    ids=repr,
)
def test_numbers_of_all_kinds_are_plain_floats(value, expected):
    found = number_of(value)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("updates", "texts"),
    [
        ([], ()),
        (
            [(("betas of group 0", (0.9, 0.5)), ("lr of group 0", math.nan))],
            ("betas of group 0=(0.9, 0.5)", "lr of group 0=nan"),
        ),
        ([(("lr", 1.0),), (("lr", 2.0),)], ("lr in update 0=1.0", "lr in update 1=2.0")),
    ],
)
def test_texts_give_name_and_value(updates, texts):
    assert texts_of(updates) == texts
