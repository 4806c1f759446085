"""What is tried and how it is decided: every candidate can be built, and the rule recommends nothing that may be noise."""

import math
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from timing_cases import flat

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError
from megabucket.layout import ParamSpec, build_layout
from megabucket.planning.candidates import (
    DEFAULT,
    Candidate,
    Measured,
    decide,
    find_candidates,
    in_mode,
    pick,
    sign_test,
    size_grid,
)
from megabucket.planning.cuts import plan_of_layout
from megabucket.planning.simulate import FENCE, GRAD_NORM, HostCosts, Mode, simulate_step_s
from megabucket.planning.workload import TensorWork, Workload

RANKS = 2


@st.composite
def models(draw):
    rows = draw(st.lists(st.tuples(st.integers(1, 40_000), st.floats(0, 1e-3), st.floats(0, 1e-3)), min_size=1, max_size=8))
    tensors = tuple(TensorWork(f"p{i}", *row) for i, row in enumerate(rows))
    order = draw(st.none() | st.permutations(range(len(rows))).map(tuple))
    return [ParamSpec(tensor.name, (tensor.numel,)) for tensor in tensors], Workload(tensors, ready_order=order)


LINKS = st.builds(flat, st.floats(0, 1e-3), st.floats(0, 1e-8))
DEFAULTS = st.builds(
    DistributedDataParallelConfig,
    use_distributed_optimizer=st.booleans(),
    overlap_grad_reduce=st.booleans(),
    bucket_size=st.none() | st.integers(1, 100_000),
)


@given(models(), LINKS, DEFAULTS, st.booleans())
def test_every_candidate_is_a_config_whose_layout_was_predicted(model, link, default, both):
    specs, workload = model
    own = Mode.REDUCE_SCATTER if default.use_distributed_optimizer else Mode.ALL_REDUCE
    measured = {mode: Measured(workload, HostCosts(launch_s=1e-4)) for mode in (Mode if both else (own,))}

    found = find_candidates(specs, default, measured, link, num_ranks=RANKS)

    assert [each for each in found if each.name == DEFAULT] == [each for each in found if each.ddp == default][:1]
    assert [each.predicted_s for each in found] == sorted(each.predicted_s for each in found)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        ddp = DistributedDataParallelConfig.model_validate(each.ddp.model_dump())  # no contradictions
        layout = build_layout(specs, ddp, dp_size=RANKS)
        assert layout.num_buckets == each.num_buckets
        assert each.mode in measured
        assert each.predicted_s == simulate_step_s(
            workload,
            plan_of_layout(workload, layout),
            link,
            num_ranks=RANKS,
            mode=each.mode,
            overlap_grad_reduce=ddp.overlap_grad_reduce,
            overlap_param_gather=ddp.overlap_param_gather,
            step_collectives=(FENCE, GRAD_NORM) if ddp.use_distributed_optimizer else (FENCE,),
            host=HostCosts(launch_s=1e-4),
        )


@given(models(), LINKS, DEFAULTS)
def test_no_two_candidates_are_the_same_plan(model, link, default):
    specs, workload = model
    measured = {mode: Measured(workload, HostCosts()) for mode in Mode}

    found = find_candidates(specs, default, measured, link, num_ranks=RANKS)

    plans = set()
    for each in found:
        layout = build_layout(specs, each.ddp, dp_size=RANKS)
        switches = (each.mode, each.ddp.overlap_grad_reduce, each.ddp.overlap_param_gather)
        plans.add((layout.fingerprint, *switches))
    assert len(plans) == len(found)


@given(models(), LINKS, st.sampled_from(Mode))
def test_optimal_cuts_are_predicted_no_slower_than_any_uniform_size_but_for_padding(model, link, mode):
    specs, workload = model
    default = in_mode(DistributedDataParallelConfig(layout="megatron"), mode)
    found = find_candidates(specs, default, {mode: Measured(workload, HostCosts())}, link, num_ranks=RANKS)

    # 128 elements at the end of each bucket and 64 at each tensor, on the way there and back.
    padding_s = 2 * len(specs) * (128 * RANKS + 64) * 4 * link.seconds_per_byte
    # Cuts that cut like the default go by its name.
    optimal_s = min(each.predicted_s for each in found if each.name.startswith((DEFAULT, "library default", "optimal cuts")))
    assert optimal_s <= found[0].predicted_s + padding_s + 1e-12


def test_another_ready_order_is_tried_as_bucket_order():
    specs = [ParamSpec("a", (1000,)), ParamSpec("b", (1000,)), ParamSpec("c", (1000,))]
    workload = Workload(tuple(TensorWork(spec.name, 1000, 1e-3) for spec in specs), ready_order=(0, 2, 1))

    found = find_candidates(
        specs,
        DistributedDataParallelConfig(),
        {Mode.ALL_REDUCE: Measured(workload, HostCosts())},
        flat(1e-5, 1e-7),
        num_ranks=2,
    )

    assert {each.ddp.bucket_order for each in found} == {None, ("a", "c", "b")}


def test_the_name_of_a_plan_says_what_it_switches_on():
    specs = [ParamSpec("a", (20_000,)), ParamSpec("b", (20_000,))]
    measured = {mode: Measured(Workload(tuple(TensorWork(spec.name, 20_000) for spec in specs)), HostCosts()) for mode in Mode}
    default = DistributedDataParallelConfig(use_distributed_optimizer=True)

    found = find_candidates(specs, default, measured, flat(1e-5, 1e-7), num_ranks=2)

    gathering = [each for each in found if each.ddp.overlap_param_gather]
    assert gathering
    assert all(each.name.endswith(", overlap_param_gather=True") for each in gathering)
    assert not any("overlap_param_gather" in each.name for each in found if each not in gathering)
    found = find_candidates(specs, in_mode(default, Mode.REDUCE_SCATTER), measured, flat(1e-5, 1e-7), num_ranks=2)
    assert not any("overlap_param_gather" in each.name for each in found)  # as in the default


@given(models())
def test_in_layout_order_each_gradient_waits_for_those_before_it(model):
    _, workload = model

    seen = workload.in_order(range(len(workload.tensors) - 1, -1, -1))

    count = len(workload.tensors)
    for index in range(count):
        assert seen.ready_s[index] == pytest.approx(max(workload.ready_s[index:]), rel=1e-9, abs=1e-12)
    assert seen.backward_s == pytest.approx(workload.backward_s)


@given(st.integers(1, 10**9))
@example(46341)  # 2 ** 15.5, rounded up
def test_sizes_grow_and_stay_below_the_whole(total):
    sizes = size_grid(total)

    assert list(sizes) == sorted(set(sizes))
    assert all(size < total for size in sizes)


def test_those_that_run_are_the_default_and_the_best_predicted():
    specs = [ParamSpec(f"p{i}", (20_000,)) for i in range(6)]
    workload = Workload(tuple(TensorWork(spec.name, 20_000, 1e-3) for spec in specs))
    found = find_candidates(
        specs,
        DistributedDataParallelConfig(),
        {Mode.ALL_REDUCE: Measured(workload, HostCosts())},
        flat(1e-4, 1e-8),
        num_ranks=2,
    )

    names = [each.name for each in pick(found, 3)]

    assert names[0] == DEFAULT
    assert next(each.name for each in found if each.name != DEFAULT) in names[1:]
    with pytest.raises(ConfigError, match="--candidates=0"):
        pick(found, 0)


# The decision #

TIMES = st.floats(1e-3, 1.0)


def rounds(count):
    return st.lists(TIMES, min_size=count, max_size=count)


MEASUREMENTS = st.integers(1, 14).flatmap(lambda n: st.fixed_dictionaries({DEFAULT: rounds(n), "a": rounds(n), "b": rounds(n)}))


@given(MEASUREMENTS)
def test_what_is_recommended_was_faster_in_more_rounds_than_chance_explains(seconds):
    decision = decide(seconds)

    if not decision.is_default:
        ratios = [d / c for d, c in zip(seconds[DEFAULT], seconds[decision.choice], strict=True)]
        assert decision.chosen.gain == pytest.approx(statistics.median(ratios) - 1)
        assert decision.chosen.gain >= decision.min_gain
        # Half of 5 %, shared by two candidates.
        assert decision.chosen.p_value <= 0.0125
        assert decision.chosen.low <= decision.chosen.gain <= decision.chosen.high


@given(MEASUREMENTS, st.randoms(use_true_random=False), st.floats(0.1, 10))
def test_neither_the_order_of_rounds_nor_the_unit_of_time_decides(seconds, random, unit):
    order = random.sample(range(len(seconds[DEFAULT])), len(seconds[DEFAULT]))
    moved = {name: [values[index] for index in order] for name, values in seconds.items()}

    assert decide(moved) == decide(seconds)
    rescaled = decide({name: [value * unit for value in values] for name, values in seconds.items()})
    assert [each.gain for each in rescaled.comparisons] == pytest.approx([each.gain for each in decide(seconds).comparisons])


@given(st.integers(1, 14).flatmap(rounds))
def test_a_copy_of_the_default_is_never_recommended(values):
    assert decide({DEFAULT: values, "copy": values}).is_default


@given(st.integers(8, 14).flatmap(rounds), st.floats(1.02, 3))
def test_what_is_always_faster_is_recommended_once_there_are_eight_rounds(values, factor):
    decision = decide({DEFAULT: [value * factor for value in values], "faster": values})

    assert decision.choice == "faster"
    assert decision.chosen.gain == pytest.approx(factor - 1)


def test_five_rounds_say_nothing_however_large_the_gain():
    decision = decide({DEFAULT: [3.0] * 5, "faster": [1.0] * 5})

    assert decision.is_default
    assert (decision.comparisons[0].low, decision.comparisons[0].high) == (-1.0, math.inf)


@pytest.mark.parametrize(("num_others", "needed"), [(1, 6), (2, 7), (4, 8)])  # 2**-needed <= 0.05 / num_others / 2
def test_a_decision_needs_more_rounds_the_more_candidates_there_are(num_others, needed):
    def after(count):
        return decide({DEFAULT: [3.0] * count, **{f"c{index}": [1.0] * count for index in range(num_others)}})

    found = [after(count) for count in (1, needed - 1, needed)]

    assert [(each.num_rounds, each.num_rounds_needed) for each in found] == [
        (1, needed),
        (needed - 1, needed),
        (needed, needed),
    ]
    assert [each.is_undecided for each in found] == [each.is_default for each in found] == [True, True, False]


@given(st.integers(8, 14).flatmap(rounds), st.lists(st.floats(0.9, 1.1), min_size=14, max_size=14))
def test_any_gain_that_counts_as_visible_is_recommended(values, noise):
    def after(gain):
        own = [value / (1 + gain) * jitter for value, jitter in zip(values, noise, strict=False)]
        return decide({DEFAULT: values, "faster": own})

    visible = after(0.0).visible_gain

    # The ratios of one with a gain are (1 + gain) times as large, and so is their spread.
    assert after(2 * visible + 0.3).choice == "faster"
    few = decide({DEFAULT: values[:3], "faster": [value * jitter for value, jitter in zip(values[:3], noise, strict=False)]})
    ratios = sorted(1 / jitter for jitter in noise[:3])
    assert few.visible_gain == pytest.approx(max(ratios[1] - ratios[0], 0.01))  # the least that it can be
    assert decide({DEFAULT: values[:1], "faster": values[:1]}).visible_gain is None


def test_of_candidates_as_good_as_the_fastest_the_one_with_the_fewest_buckets_is_recommended():
    seconds = {DEFAULT: [2.0] * 12, "fastest": [1.0] * 12, "few": [1.009] * 12, "fewer": [1.011] * 12, "slow": [2.5] * 12}
    buckets = {DEFAULT: 9, "fastest": 8, "few": 3, "fewer": 2, "slow": 1}

    assert decide(seconds, buckets).choice == "few"
    assert decide(seconds).choice == "fastest"


def test_one_of_those_to_run_has_the_fewest_buckets_of_those_predicted_as_good_as_the_best():
    ddp = DistributedDataParallelConfig()
    rows = [(DEFAULT, 1, 2.0), ("a", 9, 1.0), ("b", 8, 1.001), ("few", 2, 1.008), ("fewer", 1, 1.02)]
    candidates = [Candidate(name, ddp, count, step_s) for name, count, step_s in rows]

    assert [each.name for each in pick(candidates, 2)] == [DEFAULT, "few", "a"]
    assert [each.name for each in pick(candidates, 1)] == [DEFAULT, "few"]
    assert [each.name for each in pick(candidates[:1], 3)] == [DEFAULT]


def test_a_gain_below_the_least_that_counts_is_left_alone():
    seconds = {DEFAULT: [1.005] * 12, "faster": [1.0] * 12}

    assert decide(seconds).is_default
    assert decide(seconds, min_gain=0.001).choice == "faster"


@pytest.mark.parametrize(("faster", "total", "p"), [(10, 10, 1 / 1024), (9, 10, 11 / 1024), (0, 3, 1.0)])
def test_the_sign_test_counts_heads(faster, total, p):
    assert sign_test(faster, total) == p


def test_no_round_is_nothing_to_compare():
    with pytest.raises(ConfigError, match="no round was measured"):
        decide({DEFAULT: [], "a": []})
