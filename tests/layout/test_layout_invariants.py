"""Each named invariant is broken by hand, alone, and reported under its own name.

Nothing here is built by ``build_layout``: a layout is written down number by number, and is sound until one of them is wrong.
"""

from dataclasses import replace

import pytest

from megabucket.layout import (
    BucketLayout,
    BufferKey,
    BufferLayout,
    ModelLayout,
    ParamSlot,
)
from megabucket.testing.invariants import BUFFER_INVARIANTS, check_layout

KEY = BufferKey("float32", "float32", "dense")

# Two ranks, bucket_size 100. The walk: c [0, 100) closes bucket 0; b [128, 198) and a [256, 300) fill bucket 1: 172 elements
# from 128 to 300, up to 384.
SOUND = BufferLayout(
    key=KEY,
    params={
        "a": ParamSlot(256, 300, bucket=1, registration_index=0, shape=(4, 11)),
        "b": ParamSlot(128, 198, bucket=1, registration_index=1, shape=(70,)),
        "c": ParamSlot(0, 100, bucket=0, registration_index=2, shape=(100,)),
    },
    buckets=(BucketLayout(0, 0, 128, 100, ("c",)), BucketLayout(1, 128, 384, 172, ("b", "a"))),
    num_shards=2,
    bucket_size=100,
    start_alignment=64,
    end_multiple=128,
)

# The same parameters back to back: c [0, 100), b [100, 170) and a [170, 214), one shard.
SOUND_UNPADDED = BufferLayout(
    key=KEY,
    params={
        "a": ParamSlot(170, 214, bucket=1, registration_index=0, shape=(4, 11)),
        "b": ParamSlot(100, 170, bucket=1, registration_index=1, shape=(70,)),
        "c": ParamSlot(0, 100, bucket=0, registration_index=2, shape=(100,)),
    },
    buckets=(BucketLayout(0, 0, 100, 100, ("c",)), BucketLayout(1, 100, 214, 114, ("b", "a"))),
    num_shards=1,
    bucket_size=100,
    start_alignment=1,
    end_multiple=1,
)

# The padded one, cut by name after c, in an order that was recorded: other numbers than those of registration.
RECORDED = replace(
    SOUND,
    params={
        "a": SOUND.params["a"]._replace(registration_index=1, ready_index=8),
        "b": SOUND.params["b"]._replace(registration_index=0, ready_index=7),
        "c": SOUND.params["c"]._replace(ready_index=2),
    },
    bucket_size=None,
    cuts=("c",),
)


def with_slot(buffer: BufferLayout, name: str, **changes) -> BufferLayout:
    return replace(buffer, params={**buffer.params, name: buffer.params[name]._replace(**changes)})


def with_bucket(buffer: BufferLayout, index: int, **changes) -> BufferLayout:
    buckets = list(buffer.buckets)
    buckets[index] = replace(buckets[index], **changes)
    return replace(buffer, buckets=tuple(buckets))


def broken_names(buffer: BufferLayout) -> set[str]:
    return {text.split(":")[0] for text in check_layout(ModelLayout((buffer,)))}


# name -> (case, layout that violates it and nothing else, the text that says so)
BROKEN = {
    "each-parameter-in-one-bucket": [
        (
            "a bucket lists a name without a slot",
            with_bucket(SOUND, 1, params=("b", "a", "ghost")),
            "bucket lists 'ghost', which has no slot",
        ),
        (
            "no bucket lists a parameter without elements",
            replace(SOUND, params={**SOUND.params, "lost": ParamSlot(256, 256, 1, 7, (0,))}),
            "'lost' is listed in 0 buckets",
        ),
        (
            "the slot names another bucket",
            replace(
                SOUND_UNPADDED,
                params={
                    "a": SOUND_UNPADDED.params["a"],
                    "b": SOUND_UNPADDED.params["b"],
                    "e": ParamSlot(100, 100, bucket=0, registration_index=2, shape=(0,)),  # the border belongs to both
                    "c": SOUND_UNPADDED.params["c"]._replace(registration_index=3),
                },
                buckets=(SOUND_UNPADDED.buckets[0], replace(SOUND_UNPADDED.buckets[1], params=("e", "b", "a"))),
            ),
            "'e' is listed in bucket 1 but its slot says 0",
        ),
    ],
    "range-has-the-size-of-the-shape": [
        ("too few elements", with_slot(SOUND, "a", shape=(4, 12)), "'a' has shape (4, 12) but range [256, 300)"),
        ("negative sizes", with_slot(SOUND, "a", shape=(-4, -11)), "'a' has shape (-4, -11) but range [256, 300)"),
    ],
    "ranges-are-disjoint": [
        (
            "a parameter begins inside another",
            with_bucket(with_slot(SOUND_UNPADDED, "a", start=160, stop=204), 1, stop=204, numel_unpadded=104),
            "'b' and 'a' overlap at element 160",
        ),
    ],
    "ranges-lie-inside-their-bucket": [
        (
            "the unpadded part is too short",
            with_bucket(SOUND, 0, numel_unpadded=99),
            "'c' at [0, 100) leaves the unpadded part of bucket 0",
        ),
    ],
    "buckets-tile-the-buffer": [
        (
            "a bucket starts late",
            with_bucket(
                with_slot(with_slot(SOUND, "a", start=384, stop=428), "b", start=256, stop=326), 1, start=256, stop=512
            ),
            "bucket 1 is [256, 512), expected to start at 128",
        ),
    ],
    "order-is-reverse-registration": [
        (
            "numbers run forwards",
            with_slot(with_slot(SOUND, "a", registration_index=1), "b", registration_index=0),
            "'b' (number 0) stands before 'a' (number 1)",
        ),
    ],
    "order-is-the-recorded-one": [
        (
            "gradients come in another order",
            replace(RECORDED, params={**RECORDED.params, "a": RECORDED.params["a"]._replace(ready_index=3)}),
            "'b' (ready as number 7) stands before 'a' (number 3)",
        ),
    ],
    "starts-are-aligned": [
        (
            "a parameter starts anywhere",
            with_bucket(with_slot(SOUND, "a", start=257, stop=301), 1, numel_unpadded=173),
            "'a' starts at 257, not a multiple of 64",
        ),
        ("no multiple at all", replace(SOUND_UNPADDED, start_alignment=0), "'a' starts at 170, not a multiple of 0"),
    ],
    "bucket-ends-are-aligned": [
        ("the last bucket ends anywhere", with_bucket(SOUND, 1, stop=302), "bucket 1 ends at 302, not a multiple of 128"),
        (
            "no multiple at all",
            replace(SOUND_UNPADDED, end_multiple=0),
            "bucket 0 ends at 100, not a multiple of 0",
        ),
    ],
    "shards-are-equal": [
        (
            "three ranks",
            replace(SOUND, num_shards=3),
            "bucket 0 has 128 elements, not divisible into 3 shards",
        ),
        ("no rank", replace(SOUND, num_shards=0), "bucket 0 has 128 elements, not divisible into 0 shards"),
    ],
    "padding-is-minimal": [
        (
            "a tail of a whole multiple",
            with_bucket(SOUND, 1, stop=512),
            "bucket 1 ends with 212 elements of padding, limit 127",
        ),
        (
            "a gap of a whole alignment",
            with_bucket(with_slot(SOUND, "a", start=320, stop=364), 1, numel_unpadded=236),
            "122 unused elements before 'a', limit 63",
        ),
        (
            "elements after the last parameter count",
            with_bucket(SOUND, 0, numel_unpadded=101),
            "bucket 0 counts 1 elements after its last parameter",
        ),
        (
            "a gap counts although no shared embedding follows",
            with_bucket(SOUND, 0, numel_unpadded=128),
            "bucket 0 counts 28 elements after its last parameter",
        ),
    ],
    "no-bucket-is-empty": [
        (
            "a bucket without parameters at the end",
            replace(SOUND_UNPADDED, buckets=(*SOUND_UNPADDED.buckets, BucketLayout(2, 214, 214, 0, ()))),
            "bucket 2 holds no parameter",
        ),
    ],
    "buckets-close-where-they-should": [
        (
            "a bucket closes early",
            replace(SOUND, bucket_size=101),
            "bucket 0 closes after 'c', which neither reaches bucket_size=101 nor is a cut",
        ),
        (
            "a bucket closes without a size",
            replace(SOUND, bucket_size=None),
            "bucket 0 closes after 'c', which neither reaches bucket_size=None nor is a cut",
        ),
        ("a bucket goes on", replace(SOUND, bucket_size=70), "bucket 1 goes on after 'b'"),
        ("a cut inside a bucket", replace(RECORDED, cuts=("c", "b")), "bucket 1 goes on after 'b'"),
        (
            "a bucket closes without a cut",
            replace(RECORDED, cuts=()),
            "bucket 0 closes after 'c', which neither reaches bucket_size=None nor is a cut",
        ),
        ("a cut at nothing", replace(RECORDED, cuts=("c", "z")), "cut 'z' is no parameter of the buffer"),
        ("a size beside the cuts", replace(RECORDED, bucket_size=9), "buckets are cut by name and by bucket_size=9"),
    ],
    "shared-embeddings-are-alone": [
        (
            "an embedding shares its bucket",
            with_slot(SOUND, "b", shared_embedding=True),
            "shared embedding 'b' shares bucket 1 with 1 others",
        ),
    ],
    "key-is-known": [
        ("parameter dtype", replace(SOUND, key=BufferKey("int64", "float32", "dense")), "dtype 'int64' is not known"),
        ("gradient dtype", replace(SOUND, key=BufferKey("float32", "tf32", "dense")), "dtype 'tf32' is not known"),
        ("group", replace(SOUND, key=BufferKey("float32", "float32", "")), "the reduction group has no name"),
    ],
}
CASES = [(name, layout, text, f"{name}: {case}") for name, cases in BROKEN.items() for case, layout, text in cases]


def test_every_invariant_has_a_broken_layout_here():
    assert set(BROKEN) == set(BUFFER_INVARIANTS)


@pytest.mark.parametrize("buffer", [SOUND, SOUND_UNPADDED, RECORDED], ids=["padded", "unpadded", "recorded"])
def test_the_layouts_that_are_broken_below_are_sound_before(buffer):
    assert check_layout(ModelLayout((buffer,))) == []


@pytest.mark.parametrize(("name", "buffer", "text"), [case[:3] for case in CASES], ids=[case[3] for case in CASES])
def test_a_broken_invariant_is_reported_alone_under_its_name_with_what_is_wrong(name, buffer, text):
    violations = check_layout(ModelLayout((buffer,)))

    assert f"{name}: buffer 0 ({buffer.key}): {text}" in violations
    assert broken_names(buffer) == {name}


def test_a_parameter_in_two_buffers_is_reported():
    other = replace(
        SOUND,
        params={name: slot._replace(registration_index=slot.registration_index + 3) for name, slot in SOUND.params.items()},
    )

    assert check_layout(ModelLayout((SOUND, other))) == [
        "each-parameter-once: 'a' lies in 2 buffers",
        "each-parameter-once: 'b' lies in 2 buffers",
        "each-parameter-once: 'c' lies in 2 buffers",
    ]


def test_buffers_of_one_group_that_are_cut_for_different_numbers_of_shards_are_reported():
    def renamed(letter, group, num_shards):
        params = {name + letter: slot for name, slot in SOUND.params.items()}
        buckets = tuple(replace(bucket, params=tuple(name + letter for name in bucket.params)) for bucket in SOUND.buckets)
        return replace(SOUND, key=replace(SOUND.key, group=group), params=params, buckets=buckets, num_shards=num_shards)

    buffers = (renamed("1", "dense", 4), renamed("2", "expert", 2), renamed("3", "dense", 2))

    assert [text for text in check_layout(ModelLayout(buffers)) if not text.startswith("each-parameter-once")] == [
        "groups-have-one-size: buffers of 'dense' are cut for [2, 4] shards"
    ]


def test_a_registration_number_used_twice_is_reported_across_buffers():
    params = {name.upper(): slot for name, slot in SOUND.params.items()}
    buckets = tuple(replace(bucket, params=tuple(name.upper() for name in bucket.params)) for bucket in SOUND.buckets)

    assert check_layout(ModelLayout((SOUND, replace(SOUND, params=params, buckets=buckets)))) == [
        "each-parameter-once: registration number 0 is used 2 times",
        "each-parameter-once: registration number 1 is used 2 times",
        "each-parameter-once: registration number 2 is used 2 times",
    ]


def test_a_place_in_the_recorded_order_used_twice_is_reported_across_buffers():
    params = {
        name.upper(): slot._replace(registration_index=slot.registration_index + 3) for name, slot in RECORDED.params.items()
    }
    buckets = tuple(replace(bucket, params=tuple(name.upper() for name in bucket.params)) for bucket in RECORDED.buckets)
    other = replace(RECORDED, params=params, buckets=buckets, cuts=("C",))

    assert check_layout(ModelLayout((RECORDED, other))) == [
        "each-parameter-once: place 8 of the recorded order is used 2 times",
        "each-parameter-once: place 7 of the recorded order is used 2 times",
        "each-parameter-once: place 2 of the recorded order is used 2 times",
    ]


def test_an_order_that_knows_some_of_the_parameters_only_is_reported():
    half = with_slot(RECORDED, "c", ready_index=None)

    assert "each-parameter-once: 1 of 3 parameters have no place in the recorded order" in check_layout(ModelLayout((half,)))


def test_a_pair_of_which_one_has_no_place_is_looked_at_by_registration():
    half = with_slot(RECORDED, "a", ready_index=None)

    assert violations_of("order-is-the-recorded-one", half) == []
    assert violations_of("order-is-reverse-registration", half) == ["'b' (number 0) stands before 'a' (number 1)"]


def test_a_pair_without_a_place_hides_no_later_one():
    half = with_slot(with_slot(RECORDED, "c", ready_index=None), "a", ready_index=3)

    assert violations_of("order-is-the-recorded-one", half) == ["'b' (ready as number 7) stands before 'a' (number 3)"]


def test_a_shared_embedding_that_is_not_the_last_of_its_bucket_does_not_close_it():
    d = ParamSlot(0, 36, bucket=0, registration_index=3, shape=(36,), shared_embedding=True)
    c = SOUND.params["c"]._replace(start=64, stop=100, shape=(36,))
    buckets = (replace(SOUND.buckets[0], params=("d", "c")), SOUND.buckets[1])
    early = replace(SOUND, params={**SOUND.params, "c": c, "d": d}, buckets=buckets, bucket_size=1000)

    assert violations_of("buckets-close-where-they-should", early) == [
        "bucket 0 closes after 'c', which neither reaches bucket_size=1000 nor is a cut"
    ]


def test_a_bucket_closed_by_a_shared_embedding_may_count_the_gap_before_it():
    shared = with_slot(SOUND, "b", shared_embedding=True)
    buckets = (
        BucketLayout(0, 0, 128, 128, ("c",)),  # 100, and the 28 up to where the embedding would have started
        BucketLayout(1, 128, 256, 70, ("b",)),
        BucketLayout(2, 256, 384, 44, ("a",)),
    )
    params = {**shared.params, "a": shared.params["a"]._replace(bucket=2)}

    assert check_layout(ModelLayout((replace(shared, params=params, buckets=buckets, bucket_size=None),))) == []


def test_an_unpadded_layout_may_mix_shared_embeddings_with_others():
    assert check_layout(ModelLayout((with_slot(SOUND_UNPADDED, "b", shared_embedding=True),))) == []


def test_every_violation_of_every_buffer_is_reported_with_the_buffer():
    worse = replace(SOUND_UNPADDED, num_shards=3, key=BufferKey("float32", "float32", "expert"))
    renamed = {name + "2": slot._replace(registration_index=slot.registration_index + 3) for name, slot in worse.params.items()}
    buckets = tuple(replace(bucket, params=tuple(name + "2" for name in bucket.params)) for bucket in worse.buckets)

    violations = check_layout(ModelLayout((replace(SOUND, num_shards=3), replace(worse, params=renamed, buckets=buckets))))

    assert violations == [
        "shards-are-equal: buffer 0 (dense/float32->float32): bucket 0 has 128 elements, not divisible into 3 shards",
        "shards-are-equal: buffer 0 (dense/float32->float32): bucket 1 has 256 elements, not divisible into 3 shards",
        "shards-are-equal: buffer 1 (expert/float32->float32): bucket 0 has 100 elements, not divisible into 3 shards",
    ]


def test_a_buffer_without_buckets_is_reported_and_not_stumbled_over():
    bare = replace(SOUND, buckets=())

    assert bare.numel == 0
    assert broken_names(bare) == {"each-parameter-in-one-bucket", "ranges-lie-inside-their-bucket"}


def test_a_layout_without_buffers_is_sound():
    assert check_layout(ModelLayout(())) == []


def violations_of(name: str, buffer: BufferLayout) -> list[str]:
    """What one check finds, where the layout breaks several."""
    return list(BUFFER_INVARIANTS[name](buffer))


def test_a_parameter_without_elements_overlaps_with_nothing():
    params = {**SOUND.params, "empty": ParamSlot(50, 50, bucket=0, registration_index=3, shape=(0,))}

    assert violations_of("ranges-are-disjoint", replace(SOUND, params=params)) == []  # inside c [0, 100)


def test_each_parameter_in_a_bucket_that_is_not_there_is_reported():
    lost = with_slot(with_slot(SOUND, "a", bucket=2), "c", bucket=-1)

    assert violations_of("ranges-lie-inside-their-bucket", lost) == ["'a' is in bucket 2 of 2", "'c' is in bucket -1 of 2"]


def test_a_registration_number_used_twice_in_a_bucket_is_no_order():
    assert violations_of("order-is-reverse-registration", with_slot(SOUND, "a", registration_index=1)) == [
        "'b' (number 1) stands before 'a' (number 1)"
    ]


def test_a_tail_of_exactly_one_multiple_is_one_too_many():
    assert violations_of("padding-is-minimal", with_bucket(SOUND, 0, stop=228)) == [  # 100 + 128
        "bucket 0 ends with 128 elements of padding, limit 127"
    ]
    assert violations_of("padding-is-minimal", with_bucket(SOUND, 0, stop=227)) == []


def test_a_gap_of_exactly_one_alignment_is_one_too_many():
    # b ends at 198; the limit for a is 63 unused elements.
    assert violations_of(
        "padding-is-minimal", with_bucket(with_slot(SOUND, "a", start=262, stop=306), 1, numel_unpadded=178)
    ) == ["64 unused elements before 'a', limit 63"]
    assert (
        violations_of("padding-is-minimal", with_bucket(with_slot(SOUND, "a", start=261, stop=305), 1, numel_unpadded=177))
        == []
    )


def test_one_unused_element_is_too_many_where_nothing_is_padded():
    tail = with_bucket(SOUND_UNPADDED, 1, stop=215)
    gap = with_bucket(with_slot(SOUND_UNPADDED, "a", start=171, stop=215), 1, stop=215, numel_unpadded=115)
    counted = with_bucket(with_slot(SOUND_UNPADDED, "b", shared_embedding=True), 0, numel_unpadded=101)

    assert violations_of("padding-is-minimal", tail) == ["bucket 1 ends with 1 elements of padding, limit 0"]
    assert violations_of("padding-is-minimal", gap) == ["1 unused elements before 'a', limit 0"]
    assert "bucket 0 counts 1 elements after its last parameter" in violations_of("padding-is-minimal", counted)


def test_the_gap_before_a_shared_embedding_counts_up_to_its_alignment_only():
    # c ends at 99, so an embedding could start at 99 without padding, and at 100 with an alignment of 2.
    shared = with_slot(with_slot(SOUND_UNPADDED, "b", shared_embedding=True), "c", stop=99)

    assert violations_of("padding-is-minimal", shared) == ["bucket 0 counts 1 elements after its last parameter"]
    assert violations_of("padding-is-minimal", replace(shared, start_alignment=2)) == []


def test_a_name_without_a_slot_hides_no_gap_behind_it():
    moved = with_bucket(with_slot(SOUND, "a", start=320, stop=364), 1, params=("b", "ghost", "a"), numel_unpadded=236)

    assert violations_of("padding-is-minimal", moved) == ["122 unused elements before 'a', limit 63"]


def test_a_bucket_closes_for_a_shared_embedding_only_where_starts_are_aligned():
    shared = with_slot(replace(SOUND_UNPADDED, bucket_size=150), "b", shared_embedding=True)

    assert violations_of("buckets-close-where-they-should", shared) == [
        "bucket 0 closes after 'c', which neither reaches bucket_size=150 nor is a cut"
    ]
    assert violations_of("buckets-close-where-they-should", replace(shared, start_alignment=2)) == []


def test_only_an_embedding_that_comes_next_closes_a_bucket():
    shared = with_slot(replace(SOUND, bucket_size=150), "a", shared_embedding=True)  # b comes next

    assert violations_of("buckets-close-where-they-should", shared) == [
        "bucket 0 closes after 'c', which neither reaches bucket_size=150 nor is a cut"
    ]


def test_an_empty_bucket_hides_no_early_close_behind_it():
    empty = BucketLayout(0, 0, 0, 0, ())

    assert violations_of(
        "buckets-close-where-they-should", replace(SOUND, buckets=(empty, *SOUND.buckets), bucket_size=150)
    ) == ["bucket 0 closes after 'c', which neither reaches bucket_size=150 nor is a cut"]


def test_a_later_bucket_is_as_full_as_its_own_elements():
    third = BucketLayout(2, 384, 512, 10, ("z",))
    buffer = replace(
        SOUND,
        params={**SOUND.params, "z": ParamSlot(384, 394, bucket=2, registration_index=-1, shape=(10,))},
        buckets=(*SOUND.buckets, third),
        bucket_size=173,
    )

    # Bucket 1 starts at 128 and ends with 172 elements at 300.
    assert "bucket 1 closes after 'a', which neither reaches bucket_size=173 nor is a cut" in violations_of(
        "buckets-close-where-they-should", buffer
    )
