"""Identities of parameters: which part of the whole model each is, from Megatron's attributes or as given."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import LayoutError
from megabucket.layout import ParamIdentity, check_identities, megatron_identity, plain_identity


def param(*shape, **attributes):
    """What is read of a parameter; no tensor is needed."""
    return SimpleNamespace(shape=shape, **attributes)


def refusal(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


class TestIdentity:
    def test_a_plain_one_is_the_whole_parameter_under_its_local_name(self):
        assert plain_identity("head", (3, 4)) == ParamIdentity("head", (3, 4), (0, 0), "dense", ())

    def test_a_scalar_has_no_dimension(self):
        assert plain_identity("scale", ()) == ParamIdentity("scale", (), ())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"global_name": ""},
            {"global_shape": (4, 4)},
            {"global_shape": [4]},
            {"global_shape": (True,)},
            {"offset": (-1,)},
            {"offset": (1.0,)},
            {"group": ""},
            {"group": None},
            {"copies": "tp"},
            {"copies": None},
            {"copies": ("tp", "")},
        ],
        ids=str,
    )
    def test_what_names_no_part_of_a_tensor_is_refused_with_the_whole_identity(self, wrong):
        fields = {"global_name": "head", "global_shape": (4,), "offset": (0,), "group": "dense", "copies": (), **wrong}

        text = refusal(lambda: ParamIdentity(**fields))

        assert text.startswith(f"identity of {fields['global_name']!r}: names must be non-empty strings")
        assert all(f"{field}={value!r}" in text for field, value in fields.items())


class TestMegatron:
    @staticmethod
    def identity(name, param):
        return megatron_identity(tp_rank=1, tp_size=4)(name, param)

    def test_a_parameter_without_attributes_is_copied_along_tensor_parallel_ranks(self):
        assert self.identity("norm", param(8)) == ParamIdentity("norm", (8,), (0,), "dense", ("tp",))

    def test_a_tensor_parallel_one_is_a_block_of_a_larger_one_and_no_copy(self):
        cut = param(8, 3, tensor_model_parallel=True, partition_dim=1, partition_stride=1)

        assert self.identity("head", cut) == ParamIdentity("head", (8, 12), (0, 3), "dense", ())

    def test_one_tensor_parallel_rank_has_no_copies_elsewhere(self):
        assert megatron_identity(tp_rank=0, tp_size=1)("norm", param(8)).copies == ()

    def test_the_tied_copy_of_a_later_stage_is_one_along_the_embedding_ranks(self):
        tied = param(8, 3, tensor_model_parallel=True, partition_dim=0, shared=True)

        assert self.identity("head", tied) == ParamIdentity("head", (32, 3), (8, 0), "dense", ("embd",), ("embd",))
        copied = self.identity("head", param(8, shared=True))
        assert (copied.copies, copied.partial) == (("tp", "embd"), ("embd",))

    def test_a_copy_that_sees_a_part_of_the_sequence_has_a_part_of_the_gradient(self):
        assert self.identity("norm", param(8, sequence_parallel=True)).partial == ("tp",)
        cut = param(8, 3, tensor_model_parallel=True, partition_dim=0, sequence_parallel=True)
        assert self.identity("head", cut).partial == ()

    def test_parts_of_a_gradient_lie_along_copies(self):
        text = refusal(lambda: ParamIdentity("head", (4,), (0,), copies=("tp",), partial=("embd",)))

        assert "partial some of them" in text

    def test_a_parameter_that_is_not_reduced_with_the_others_is_an_expert(self):
        assert self.identity("expert", param(8, allreduce=False)).group == "expert"
        assert self.identity("dense", param(8, allreduce=True)).group == "dense"

    def test_experts_may_be_cut_over_ranks_of_their_own(self):
        identity = megatron_identity(tp_rank=1, tp_size=4, expert_tp=(0, 2))
        cut = {"tensor_model_parallel": True, "partition_dim": 0}

        assert identity("expert", param(8, allreduce=False, **cut)) == ParamIdentity("expert", (16,), (0,), "expert")
        assert identity("bias", param(8, allreduce=False)).copies == ("expert_tp",)
        assert identity("dense", param(8, **cut)) == ParamIdentity("dense", (32,), (8,))

    def test_an_expert_that_no_other_rank_cuts_is_no_copy_of_those_beside_it(self):
        # Tensor parallel 4 in attention, expert parallel 4 in the same place: each of the four ranks has other experts.
        assert megatron_identity(tp_rank=1, tp_size=4, expert_tp=(0, 1))("w", param(8, allreduce=False)).copies == ()

    def test_global_names_come_from_the_caller(self):
        identity = megatron_identity(tp_rank=0, tp_size=2, name_of=lambda name: name.replace("layers.0", "layers.6"))

        assert identity("layers.0.norm", param(8)).global_name == "layers.6.norm"

    @pytest.mark.parametrize(("dim", "stride"), [(0, 2), (2, 1), (-1, 1)])
    def test_parts_that_are_no_contiguous_block_are_refused_by_name(self, dim, stride):
        gated = param(8, 3, tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)

        assert refusal(lambda: self.identity("mlp.fc1", gated)) == (
            f"parameter 'mlp.fc1' of shape (8, 3) is no contiguous block of a larger one: partition_dim={dim}, "
            f"partition_stride={stride}. Give identity= a function that knows where its parts belong"
        )

    def test_on_one_rank_the_parts_of_a_fused_layer_are_together(self):
        gated = param(8, 3, tensor_model_parallel=True, partition_dim=0, partition_stride=2)

        assert megatron_identity(tp_rank=0, tp_size=1)("mlp.fc1", gated) == plain_identity("mlp.fc1", (8, 3))

    def test_a_cut_without_a_dimension_is_refused(self):
        text = refusal(lambda: self.identity("head", param(8, 3, tensor_model_parallel=True)))

        assert "partition_dim=-1, partition_stride=1" in text


class TestClaims:
    def test_pieces_beside_each_other_are_sound(self):
        check_identities(
            {"a": ParamIdentity("w", (4, 6), (0, 0)), "b": ParamIdentity("w", (4, 6), (0, 3)), "c": plain_identity("c", ())},
            {"a": (4, 3), "b": (4, 3), "c": ()},
        )

    def test_an_element_with_two_owners_is_refused_with_both(self):
        identities = {"a": ParamIdentity("w", (4, 6), (0, 0)), "b": ParamIdentity("w", (4, 6), (3, 2))}

        assert refusal(lambda: check_identities(identities, {"a": (4, 3), "b": (1, 3)})) == (
            "parameters 'a' and 'b' claim the same part of 'w': shape (4, 3) at (0, 0) of (4, 6), and (1, 3) at (3, 2) of "
            "(4, 6). Norms would count it twice and checkpoints keep one of them. Give each its own global_name or place; or, "
            "if they are copies on two ranks, pass a group (in groups=, or copies=) that joins these ranks"
        )

    def test_two_shapes_of_one_tensor_are_refused_also_where_the_pieces_lie_apart(self):
        identities = {"a": ParamIdentity("w", (4,), (0,)), "b": ParamIdentity("w", (6,), (4,))}

        assert "shape (4,) at (0,) of (4,), and (2,) at (4,) of (6,)" in refusal(
            lambda: check_identities(identities, {"a": (4,), "b": (2,)})
        )

    def test_a_scalar_can_be_claimed_once_only(self):
        identities = {name: ParamIdentity("scale", (), ()) for name in ("a", "b")}

        assert refusal(lambda: check_identities(identities, {"a": (), "b": ()})).startswith("parameters 'a' and 'b' claim")

    def test_a_piece_without_elements_claims_none(self):
        identities = {"a": ParamIdentity("w", (4,), (0,)), "b": ParamIdentity("w", (4,), (2,))}

        check_identities(identities, {"a": (4,), "b": (0,)})

    @pytest.mark.parametrize(("shape", "offset"), [((5,), (0,)), ((3,), (2,)), ((4, 1), (0,)), ((), (0,))])
    def test_a_piece_outside_its_tensor_is_refused_by_name(self, shape, offset):
        text = refusal(lambda: check_identities({"local": ParamIdentity("w", (4,), offset)}, {"local": shape}))

        assert text == (
            f"parameter 'local' of shape {shape} at offset {offset} lies outside 'w' of shape (4,). Checkpoints would store it "
            "at a wrong place; correct what identity= gives for it"
        )

    def test_parameters_without_identity_and_identities_without_parameter_are_named(self):
        text = refusal(
            lambda: check_identities({"a": plain_identity("a", ()), "c": plain_identity("c", ())}, {"a": (), "b": ()})
        )

        assert text == "parameters and identities do not match: 'b', 'c'"


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


@given(shape=SHAPES, dim=st.integers(0, 2), tp_size=st.integers(1, 6))
def test_the_pieces_of_all_tensor_parallel_ranks_tile_the_whole_tensor(shape, dim, tp_size):
    piece = param(*shape, tensor_model_parallel=True, partition_dim=dim % len(shape))
    by_rank = {f"rank {rank}": megatron_identity(tp_rank=rank, tp_size=tp_size)("w", piece) for rank in range(tp_size)}

    check_identities(by_rank, dict.fromkeys(by_rank, shape))
    (whole,) = {identity.global_shape for identity in by_rank.values()}
    owners = np.zeros(whole, dtype=np.int64)
    for identity in by_rank.values():
        owners[tuple(slice(start, start + size) for start, size in zip(identity.offset, shape, strict=True))] += 1
    assert (owners == 1).all()


@given(data=st.data(), whole=st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_two_pieces_are_refused_exactly_when_they_have_an_element_in_common(data, whole):
    identities, shapes, marked = {}, {}, np.zeros(whole, dtype=np.int64)
    for name in ("a", "b"):
        offset = tuple(data.draw(st.integers(0, size)) for size in whole)
        shapes[name] = tuple(data.draw(st.integers(0, size - start)) for start, size in zip(offset, whole, strict=True))
        identities[name] = ParamIdentity("w", whole, offset)
        marked[tuple(slice(start, start + size) for start, size in zip(offset, shapes[name], strict=True))] += 1

    if (marked > 1).any():
        assert refusal(lambda: check_identities(identities, shapes)).startswith("parameters 'a' and 'b' claim the same part")
    else:
        check_identities(identities, shapes)
