"""The reshard plan: whatever the two layouts are, every wanted element is copied once, and back again gives the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.checkpoint.plan import Copy, StoredRange, WantedRange, coverage_problem, files_of, plan_reads

NAMES = ("a", "b", "c")


def cuts(numel: int):
    """Ranges that cover ``0:numel`` once, each in a file of its own choice; shrinks towards one range in file 0."""
    inner = st.lists(st.integers(1, max(1, numel - 1)), max_size=6).map(lambda at: sorted({0, numel, *at}) if numel else [0, 0])
    return inner.flatmap(
        lambda edges: st.lists(st.integers(0, 4), min_size=len(edges) - 1, max_size=len(edges) - 1).map(
            lambda files: [StoredRange(file, start, stop) for file, start, stop in zip(files, edges, edges[1:], strict=False)]
        )
    )


@st.composite
def layouts(draw, sizes=None):
    """Stored ranges of three tensors, of drawn sizes unless given."""
    numels = sizes or draw(st.tuples(*(st.integers(0, 40) for _ in NAMES)))
    return {name: draw(cuts(numel)) for name, numel in zip(NAMES, numels, strict=True)}


def ranks_of(layout):
    """A layout as what ranks want: the file of a range is the rank that wants it."""
    return [WantedRange(name, part.start, part.stop) for name, ranges in layout.items() for part in ranges]


def contents(layout, flat):
    """The elements of each stored range."""
    return {(name, part): flat[name][part.start : part.stop] for name, ranges in layout.items() for part in ranges}


def carry_out(copies: list[Copy], held, wanted):
    targets = [[None] * (want.stop - want.start) for want in wanted]
    for copy in copies:
        source = held[copy.name, copy.source][copy.source_start : copy.source_start + copy.numel]
        assert len(source) == copy.numel
        place = slice(copy.target_start, copy.target_start + copy.numel)
        assert targets[copy.target][place] == [None] * copy.numel, "an element was copied twice"
        targets[copy.target][place] = source
    return targets


layout_pairs = st.tuples(*(st.integers(0, 40) for _ in NAMES)).flatmap(
    lambda sizes: st.tuples(st.just(sizes), layouts(sizes=sizes), layouts(sizes=sizes))
)


@given(pair=layout_pairs)
def test_from_one_layout_to_another_and_back_is_the_identity(pair):
    sizes, first, second = pair
    flat = {name: [f"{name}{i}" for i in range(numel)] for name, numel in zip(NAMES, sizes, strict=True)}

    there = carry_out(plan_reads(first, ranks_of(second)), contents(first, flat), ranks_of(second))
    held = {(want.name, part): values for (want, part, values) in zip_ranges(second, there)}
    back = carry_out(plan_reads(second, ranks_of(first)), held, ranks_of(first))

    assert there == list(contents(second, flat).values())
    assert back == list(contents(first, flat).values())


def zip_ranges(layout, values):
    parts = [part for ranges in layout.values() for part in ranges]
    return zip(ranks_of(layout), parts, values, strict=True)


@given(data=st.data(), stored=layouts())
def test_any_ranges_are_filled_element_by_element_once_with_what_is_stored(data, stored):
    flat = {name: list(range(ranges[-1].stop)) for name, ranges in stored.items()}
    wanted = []
    for _ in range(data.draw(st.integers(0, 6))):
        name = data.draw(st.sampled_from(NAMES))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(flat[name]))] * 2)))
        wanted.append(WantedRange(name, start, stop))

    filled = carry_out(plan_reads(stored, wanted), contents(stored, flat), wanted)

    assert filled == [flat[want.name][want.start : want.stop] for want in wanted]


@given(data=st.data(), stored=layouts())
def test_no_plan_has_fewer_copies_and_no_file_is_read_that_is_not_needed(data, stored):
    name = data.draw(st.sampled_from(NAMES))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, stored[name][-1].stop)] * 2)))

    copies = plan_reads(stored, [WantedRange(name, start, stop)])

    touched = [part for part in stored[name] if max(part.start, start) < min(part.stop, stop)]
    assert [copy.source for copy in copies] == touched
    assert sum(copy.numel for copy in copies) == stop - start
    assert list(files_of(copies)) == sorted({part.file for part in touched})


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("other_dp_size", [1, 2, 5, 64])
def test_shards_of_any_number_of_ranks_are_filled_from_those_of_any_other(dp_size, other_dp_size):
    numel = 1_001
    stored = {"w": [StoredRange(r, numel * r // dp_size, numel * (r + 1) // dp_size) for r in range(dp_size)]}
    wanted = [WantedRange("w", numel * r // other_dp_size, numel * (r + 1) // other_dp_size) for r in range(other_dp_size)]
    held = {("w", part): list(range(part.start, part.stop)) for part in stored["w"]}

    filled = carry_out(plan_reads(stored, wanted), held, wanted)

    assert [element for part in filled for element in part] == list(range(numel))


@pytest.mark.parametrize(
    ("ranges", "numel", "problem"),
    [
        ([], 3, "elements 0:3 are in no file"),
        ([(0, 3)], 4, "elements 3:4 are in no file"),
        ([(0, 5)], 4, "elements 4:5 are there twice, or beyond its 4"),
        ([(0, 2), (1, 4)], 4, "elements 1:2 are there twice, or beyond its 4"),
        ([(0, 2), (0, 2), (2, 4)], 4, "elements 0:2 are there twice, or beyond its 4"),
        ([(0, 2), (3, 4)], 4, "elements 2:3 are in no file"),
        ([(0, 2), (2, 2), (2, 4)], 4, "the range 2:2 is empty"),
        ([], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 0), (0, 0)], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 1)], 0, "it has no elements, so one range 0:0 must stand for it"),
        ([(0, 0)], 0, None),
        ([(2, 4), (0, 2)], 4, None),
    ],
)
def test_what_does_not_cover_a_tensor_once_is_said(ranges, numel, problem):
    assert coverage_problem([StoredRange(0, *edges) for edges in ranges], numel) == problem


@given(ranges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4), numel=st.integers(1, 6))
def test_ranges_without_a_problem_hold_each_element_once_and_others_do_not(ranges, numel):
    held = sorted(element for start, stop in ranges for element in range(start, stop))
    is_cover = held == list(range(numel)) and all(start < stop for start, stop in ranges)

    assert (coverage_problem([StoredRange(0, *edges) for edges in ranges], numel) is None) == is_cover


@pytest.mark.parametrize("want", [WantedRange("w", 0, 5), WantedRange("w", -1, 2), WantedRange("w", 3, 2)])
def test_a_range_beyond_the_tensor_is_refused(want):
    with pytest.raises(ValueError, match="is not within 0:4 of 'w'"):
        plan_reads({"w": [StoredRange(0, 0, 4)]}, [want])


def test_an_unknown_tensor_is_refused():
    with pytest.raises(ValueError, match="no tensor 'v' is stored"):
        plan_reads({"w": [StoredRange(0, 0, 4)]}, [WantedRange("v", 0, 1)])
