"""Each rule of the plan of owners is needed: without it a model is planned wrongly, and a check says how."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from owner_oracles import assert_each_element_travels_once

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout, invariants, owners

SOURCE = Path(owners.__file__).read_text()


@dataclass(frozen=True)
class Mutant:
    """A text of the module that is replaced once, and what a check then says."""

    name: str
    old: str
    new: str
    said: str


MUTANTS = [
    Mutant("the shortest goes first", "key=itemgetter(0), reverse=True)", "key=itemgetter(0))", "busiest-is-within-4/3"),
    Mutant("loads are forgotten", "self._of[rank] += cost", "pass", "busiest-is-within-4/3"),
    Mutant("any holder will do", "if self._of[rank] == least)", "if True)", "busiest-is-within-4/3"),
    Mutant("loads of all groups are one", "if group not in loads:", "if not loads:", "KeyError"),
    Mutant("empty tensors are owned", "if buffer.params[name].numel]", "]", "each-tensor-once"),
    Mutant("pieces go out in buffer order", "key=lambda piece: owner_of[piece.param])", "key=itemgetter(1))", "not the whole"),
    Mutant("no piece goes to oneself", "for piece in held:", "for piece in held[1:]:", "sent-is-received"),
    Mutant(
        "tensors arrive in reverse",
        "owned = [name for name in bucket.params if",
        "owned = [name for name in reversed(bucket.params) if",
        "not the whole",
    ),
    Mutant(
        "a holder ends one too early", "yield rank, Span(start, stop)", "yield rank, Span(start, stop - 1)", "sent-is-received"
    ),
    Mutant("shards begin with the buffer", "(start - bucket.start) //", "start //", "IndexError"),
    Mutant(
        "an owner receives other owners' tensors",
        "owner_of.get(name) == rank]",
        "owner_of.get(name, 0) <= rank and name in owner_of]",
        "sent-is-received",
    ),
]


def models():
    """Layouts whose parameters are cut, empty, of several groups, in several buckets, and more than the ranks."""
    shapes = [(30, 20), (7, 9), (0, 4), (16, 16), (50, 3), (9, 9), (9, 9), (128, 9), (3, 3)]
    dense = [ParamSpec(f"w{index}", shape) for index, shape in enumerate(shapes)]
    expert = [ParamSpec(f"e{index}", shape, group="expert") for index, shape in enumerate(shapes)]
    long_one_among_short_ones = [ParamSpec("w0", (64, 64)), *(ParamSpec(f"w{index}", (32, 32)) for index in range(3, 11))]
    yield build_layout(long_one_among_short_ones, DistributedDataParallelConfig(), dp_size=2)
    for dp_size in (1, 2, 3, 8):
        for bucket_size in (1, 700, 10_000):
            config = DistributedDataParallelConfig(bucket_size=bucket_size)
            yield build_layout(dense, config, dp_size=dp_size)
            yield build_layout([*dense, *expert], config, dp_size=dp_size, group_sizes={"expert": 2})


def first_fault(module):
    """What is wrong with the plans of a module, or nothing."""
    for layout in models():
        wanted = {name for buffer in layout.buffers for name, slot in buffer.params.items() if slot.numel}
        asked = {*wanted, "w2", "e2"} - {"w1"}
        try:
            plan = module.plan_owners(layout, asked)
            if violations := invariants.check_owners(layout, plan, wanted - {"w1"}):
                return violations[0]
            for buffer in layout.buffers:
                assert_each_element_travels_once(buffer, plan.owner_of, module.plan_exchange)
        except (AssertionError, LookupError, ValueError) as error:
            return repr(error)
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_planner_is_killed(mutant, monkeypatch):
    assert SOURCE.count(mutant.old) == 1
    module = ModuleType("mutant_of_owners")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look up their annotations
    exec(compile(SOURCE.replace(mutant.old, mutant.new), mutant.name, "exec"), module.__dict__)  # noqa: S102
    monkeypatch.setattr(invariants, "plan_exchange", module.plan_exchange)

    fault = first_fault(module)

    assert fault is not None, "survived"
    assert mutant.said in fault


def test_the_planner_as_it_is_passes_the_same_models():
    assert first_fault(owners) is None
