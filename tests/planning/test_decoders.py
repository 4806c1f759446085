"""Decoders beyond the plain GPT and Llama: biases, heads of their own width, experts, latent attention."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec
from megabucket.planning import param_specs
from megabucket.planning.model_config import LlamaConfig, MlaConfig, MoeConfig
from megabucket.planning.workload import workload_of_specs

LLAMA = {"kind": "llama", "vocab_size": 10, "num_layers": 1, "hidden_size": 8, "ffn_size": 6, "num_heads": 4}
MOE = {
    "kind": "moe",
    "vocab_size": 10,
    "num_layers": 1,
    "hidden_size": 8,
    "num_heads": 4,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "expert_ffn_size": 6,
}
MLA = {"kv_rank": 3, "nope_head_size": 2, "rope_head_size": 1, "value_head_size": 5}


def named(specs):
    return [(spec.name, spec.shape) for spec in specs]


def test_heads_may_be_wider_than_their_share_of_the_residual_stream():
    specs = {spec.name: spec.shape for spec in param_specs(LlamaConfig(**LLAMA, head_size=5, num_kv_heads=2))}

    attention = "model.layers.0.self_attn"
    assert specs[f"{attention}.q_proj.weight"] == (20, 8)  # 4 heads of 5
    assert specs[f"{attention}.k_proj.weight"] == specs[f"{attention}.v_proj.weight"] == (10, 8)
    assert specs[f"{attention}.o_proj.weight"] == (8, 20)


def test_a_llama_has_the_biases_it_is_asked_for():
    specs = named(param_specs(LlamaConfig(**LLAMA, num_kv_heads=2, qkv_bias=True, output_bias=True, mlp_bias=True)))

    assert [(name.removeprefix("model.layers.0."), shape) for name, shape in specs if name.endswith("bias")] == [
        ("self_attn.q_proj.bias", (8,)),
        ("self_attn.k_proj.bias", (4,)),
        ("self_attn.v_proj.bias", (4,)),
        ("self_attn.o_proj.bias", (8,)),
        ("mlp.gate_proj.bias", (6,)),
        ("mlp.up_proj.bias", (6,)),
        ("mlp.down_proj.bias", (8,)),
    ]


def test_mixtral_has_a_router_and_experts_of_their_own_group():
    specs = param_specs(MoeConfig(**MOE, names="mixtral", num_kv_heads=2, dtype="bfloat16"))

    experts = "model.layers.0.block_sparse_moe"
    assert named(specs) == [
        ("model.embed_tokens.weight", (10, 8)),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8)),
        ("model.layers.0.self_attn.k_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.v_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8)),
        (f"{experts}.gate.weight", (2, 8)),
        (f"{experts}.experts.0.w1.weight", (6, 8)),
        (f"{experts}.experts.0.w2.weight", (8, 6)),
        (f"{experts}.experts.0.w3.weight", (6, 8)),
        (f"{experts}.experts.1.w1.weight", (6, 8)),
        (f"{experts}.experts.1.w2.weight", (8, 6)),
        (f"{experts}.experts.1.w3.weight", (6, 8)),
        ("model.layers.0.input_layernorm.weight", (8,)),
        ("model.layers.0.post_attention_layernorm.weight", (8,)),
        ("model.norm.weight", (8,)),
        ("lm_head.weight", (10, 8)),
    ]
    assert {spec.name for spec in specs if spec.group == "expert"} == {spec.name for spec in specs if ".experts." in spec.name}
    assert {spec.dtype for spec in specs} == {"bfloat16"}


def test_deepseek_has_dense_blocks_first_then_routed_and_shared_experts_under_latent_attention():
    sizes = {**MOE, "num_layers": 2, "num_shared_experts": 3, "num_dense_layers": 1, "dense_ffn_size": 7}

    specs = param_specs(MoeConfig(**sizes, mla=MlaConfig(**MLA, query_rank=9)))

    first, second = (
        [(spec.name.removeprefix(f"model.layers.{layer}."), spec.shape) for spec in specs if f"layers.{layer}." in spec.name]
        for layer in (0, 1)
    )
    attention = [
        ("self_attn.q_a_proj.weight", (9, 8)),
        ("self_attn.q_a_layernorm.weight", (9,)),
        ("self_attn.q_b_proj.weight", (12, 9)),  # 4 heads of 2 + 1
        ("self_attn.kv_a_proj_with_mqa.weight", (4, 8)),  # 3 + 1
        ("self_attn.kv_a_layernorm.weight", (3,)),
        ("self_attn.kv_b_proj.weight", (28, 3)),  # 4 heads of 2 + 5
        ("self_attn.o_proj.weight", (8, 20)),  # 4 heads of 5
    ]
    norms = [("input_layernorm.weight", (8,)), ("post_attention_layernorm.weight", (8,))]
    assert first == [
        *attention,
        ("mlp.gate_proj.weight", (7, 8)),
        ("mlp.up_proj.weight", (7, 8)),
        ("mlp.down_proj.weight", (8, 7)),
        *norms,
    ]
    assert second == [
        *attention,
        ("mlp.experts.0.gate_proj.weight", (6, 8)),
        ("mlp.experts.0.up_proj.weight", (6, 8)),
        ("mlp.experts.0.down_proj.weight", (8, 6)),
        ("mlp.experts.1.gate_proj.weight", (6, 8)),
        ("mlp.experts.1.up_proj.weight", (6, 8)),
        ("mlp.experts.1.down_proj.weight", (8, 6)),
        ("mlp.gate.weight", (2, 8)),
        ("mlp.shared_experts.gate_proj.weight", (18, 8)),  # 3 experts of 6
        ("mlp.shared_experts.up_proj.weight", (18, 8)),
        ("mlp.shared_experts.down_proj.weight", (8, 18)),
        *norms,
    ]
    assert {spec.group for spec in specs if "shared_experts" in spec.name or "mlp.gate." in spec.name} == {"dense"}


def test_queries_may_be_projected_directly():
    specs = {spec.name: spec.shape for spec in param_specs(MoeConfig(**MOE, mla=MlaConfig(**MLA)))}

    assert specs["model.layers.0.self_attn.q_proj.weight"] == (12, 8)
    assert "model.layers.0.self_attn.q_a_proj.weight" not in specs


def test_a_tied_head_is_counted_once():
    specs = param_specs(MoeConfig(**MOE, tied_embeddings=True))

    assert specs[-1] == ParamSpec("model.norm.weight", (8,))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 9}, "hidden_size=9 is not a multiple of num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_experts_per_token": 3}, "num_experts_per_token=3 is more than num_experts=2"),
        (
            {"num_dense_layers": 2, "dense_ffn_size": 4},
            "num_dense_layers=2 is more than num_layers=1",
        ),
        (
            {"mla": MLA, "num_kv_heads": 2, "head_size": 2},
            (
                "num_kv_heads belongs to plain attention and is not read with mla; drop one of them; "
                "head_size belongs to plain attention and is not read with mla; drop one of them"
            ),
        ),
        (
            {"num_dense_layers": 1},
            "num_dense_layers=1 and dense_ffn_size=None belong together; give both, or neither",
        ),
        (
            {"dense_ffn_size": 4},
            "num_dense_layers=0 and dense_ffn_size=4 belong together; give both, or neither",
        ),
        (
            {"names": "mixtral", "num_shared_experts": 1},
            "names=mixtral knows neither mla, nor shared experts, nor dense layers; use names=deepseek",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, text):
    with pytest.raises(ValidationError) as caught:
        MoeConfig(**{**MOE, **changes})

    assert [detail["msg"] for detail in caught.value.errors()] == [f"Value error, {text}"]


def test_a_head_size_of_its_own_needs_no_multiple():
    assert MoeConfig(**{**MOE, "hidden_size": 9}, head_size=5).resolved_head_size == 5
    assert LlamaConfig(**{**LLAMA, "hidden_size": 9}, head_size=5).resolved_head_size == 5


def test_an_expert_computes_its_share_of_the_tokens():
    model = MoeConfig(**{**MOE, "num_experts": 4, "num_experts_per_token": 1}, names="mixtral")

    workload = workload_of_specs(param_specs(model), DistributedDataParallelConfig(), flop_s=100.0, model=model)

    seconds = {tensor.name: (tensor.forward_s, tensor.backward_s) for tensor in workload.tensors}
    # 48 elements, 100 tokens of which each expert gets a quarter, 2 operations forward and 4 backward.
    assert seconds["model.layers.0.block_sparse_moe.experts.3.w1.weight"] == (48 * 25 * 2, 48 * 25 * 4)
    assert seconds["model.layers.0.block_sparse_moe.gate.weight"] == (32 * 100 * 2, 32 * 100 * 4)
