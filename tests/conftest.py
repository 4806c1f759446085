"""Hypothesis profiles: ``check`` where CI=true, ``dev`` elsewhere, ``nightly`` for ``make nightly``.

``--hypothesis-profile`` chooses. ``dev`` looks for new examples at each run; the others try the same ones every time.
``mutation`` is for ``make mutation``, which runs the tests once per mutant: few examples, and the same ones every time.

A test with several parameters has as many cells as their product. By day it is tried in cells that together have each value of
each parameter, or each pair of values where it is marked ``pairs``; all other cells are ``nightly``, as if they were marked so.
"""

import gc
import itertools
import multiprocessing
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from megabucket.errors import log_once

# No deadline: the first call of anything in torch is slow. No check for slow data: the machine is shared with other tests.
_SHARED_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

_REPEATABLE = {"derandomize": True, "print_blob": True}

settings.register_profile("dev", max_examples=100, **_SHARED_MACHINE)
settings.register_profile("check", max_examples=100, **_REPEATABLE, **_SHARED_MACHINE)
settings.register_profile("nightly", max_examples=2_000, **_REPEATABLE, **_SHARED_MACHINE)
settings.register_profile(
    "mutation",
    max_examples=25,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # one failure is enough, however large
    **_SHARED_MACHINE,
)
settings.load_profile("check" if os.environ.get("CI") == "true" else "dev")

# A test process has one fork server, whoever starts it first, so what it loads is the same for all who fork from it.
# Torch loads torch._dynamo with the first optimizer, which takes each process as long as torch itself.
multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo", "megabucket.ddp"])

# One thread, in this process and in those that tests start: with more, the order of sums in a matrix product is another one.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ.pop("COLUMNS", None)  # what prints tables adapts to it, and so would tests of their text

# A shell that starts the tests in the background lets them ignore SIGINT, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _notices_are_said_again() -> None:
    log_once.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cells to the night, and put files that take long first. The order inside of files stays as it is.

    ``make test`` gives whole files to its workers in this order. Short files at the end leave no worker without work.
    """
    _leave_cells_to_the_night(items)
    marked = ("dist", "slow", "long_file")
    long_files = {item.path for item in items if any(item.get_closest_marker(name) for name in marked)}
    items.sort(key=lambda item: item.path not in long_files)


def _leave_cells_to_the_night(items: list[pytest.Item]) -> None:
    cells_of = defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("nightly"):
            together = 2 if item.get_closest_marker("pairs") else 1
            values = [*enumerate(item.callspec._idlist)]  # one of each ``parametrize``
            cells_of[item.parent, item.originalname][item] = {*itertools.combinations(values, min(together, len(values)))}
    for cells in cells_of.values():
        for item in set(cells) - set(_covering(cells)):
            item.add_marker("nightly")


def _covering(cells: dict[pytest.Item, set[tuple]]) -> Iterator[pytest.Item]:
    """Yield few cells that have all the values (or pairs of values) of all cells, each of them about equally often."""
    missing, times = set().union(*cells.values()), Counter()
    while missing:
        cell = max(cells, key=lambda cell: (len(cells[cell] & missing), -sum(times[value] for value in cells[cell])))
        missing -= cells[cell]
        times.update(cells[cell])
        yield cell


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported and collected stays
    try:
        return (yield)
    finally:
        _leave_to_the_end_of_the_process()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, BaseException):  # and would keep alive whatever it was raised in
            value.__traceback__ = value.__context__ = None
    if nextitem is not None and nextitem.path != item.path:
        _leave_to_the_end_of_the_process()
    return result


def _leave_to_the_end_of_the_process() -> None:
    """Collect garbage, then let no later collection look at what is still alive.

    Torch, the tests and their reports are millions of objects that stay. Without this, the collector passes over all of them
    again and again, which takes a third of the time of the tests. Between files no test holds anything that it would miss.
    """
    gc.collect()
    gc.freeze()
