"""Models described by the ``config.json`` of Hugging Face."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.errors import ConfigError
from megabucket.planning import load_config, param_specs
from megabucket.planning.architecture import decoder_of
from megabucket.planning.hf_config import read_hf_config
from megabucket.planning.model_config import GptConfig, HfConfig, LlamaConfig, MoeConfig

# The released files, without what says nothing about parameters.
LLAMA2_7B = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MISTRAL_7B = {**LLAMA2_7B, "model_type": "mistral", "intermediate_size": 14_336, "num_key_value_heads": 8}
MIXTRAL_8X7B = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
SMOLLM2_360M = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 960,
    "intermediate_size": 2_560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN25_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3_584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN3_600M = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    **QWEN3_600M,
    "hidden_size": 4_096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1_024, "n_embd": 768, "n_layer": 12, "n_head": 12}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2_048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1_408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": None,
    "attention_bias": False,
    **LATENT,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2_048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1_536,
    "quantization_config": {"quant_method": "fp8"},
    "torch_dtype": "bfloat16",
    **LATENT,
}


@pytest.fixture
def write(tmp_path):
    def write_file(data):
        path = tmp_path / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return HfConfig(kind="hf_config", path=str(path))

    return write_file


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        param_specs(config)
    return str(caught.value).replace(config.path, "config.json")


@pytest.mark.parametrize(
    ("data", "num_params", "numel"),
    [
        (GPT2, 148, 124_439_808),
        ({**GPT2, "n_embd": 1_600, "n_layer": 48, "n_head": 25}, 580, 1_557_611_200),
        (LLAMA2_7B, 291, 6_738_415_616),
        (MISTRAL_7B, 291, 7_241_732_096),
        (MIXTRAL_8X7B, 995, 46_702_792_704),
        (SMOLLM2_360M, 290, 361_821_120),
        (QWEN25_7B, 339, 7_615_616_512),
        (QWEN3_600M, 310, 596_049_920),
        (QWEN3_8B, 399, 8_190_735_360),
        (QWEN3_30B_A3B, 18_867, 30_532_122_624),
        (DEEPSEEK_V2_LITE, 5_291, 15_706_484_224),
        # Published with the biases of 58 routers, 256 elements each that no gradient trains: 671,026,419,200 in 45,395 tensors.
        (DEEPSEEK_V3, 45_395 - 58, 671_026_419_200 - 58 * 256),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_released_models_have_the_published_number_of_parameters(write, data, num_params, numel):
    specs = param_specs(write(data))

    assert (len(specs), sum(spec.numel for spec in specs)) == (num_params, numel)
    assert max(Counter(spec.name for spec in specs).values()) == 1


def test_gpt_2_has_the_names_and_shapes_of_its_checkpoint(write):
    specs = param_specs(write({**GPT2, "vocab_size": 9, "n_positions": 5, "n_embd": 4, "n_layer": 1, "n_head": 2}))

    block = "transformer.h.0"
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("transformer.wte.weight", (9, 4)),
        ("transformer.wpe.weight", (5, 4)),
        (f"{block}.ln_1.weight", (4,)),
        (f"{block}.ln_1.bias", (4,)),
        (f"{block}.attn.c_attn.weight", (4, 12)),  # a Conv1D: inputs first
        (f"{block}.attn.c_attn.bias", (12,)),
        (f"{block}.attn.c_proj.weight", (4, 4)),
        (f"{block}.attn.c_proj.bias", (4,)),
        (f"{block}.ln_2.weight", (4,)),
        (f"{block}.ln_2.bias", (4,)),
        (f"{block}.mlp.c_fc.weight", (4, 16)),
        (f"{block}.mlp.c_fc.bias", (16,)),
        (f"{block}.mlp.c_proj.weight", (16, 4)),
        (f"{block}.mlp.c_proj.bias", (4,)),
        ("transformer.ln_f.weight", (4,)),
        ("transformer.ln_f.bias", (4,)),
    ]


def parameters_of_transformers(config):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup installs it")
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(Path(config.path).parent)
        )
    return [(name, tuple(param.shape)) for name, param in module.named_parameters()]


SMALL_QWEN3 = {
    **QWEN3_600M,
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_qwen3_has_the_parameters_of_the_library_in_its_order(write, is_tied, has_bias):
    config = write({**SMALL_QWEN3, "tie_word_embeddings": is_tied, "attention_bias": has_bias})

    assert [(spec.name, spec.shape) for spec in param_specs(config)] == parameters_of_transformers(config)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_qwen3_with_experts_has_those_of_the_library_which_stacks_the_experts(write, key):
    small = {**QWEN3_30B_A3B, **SMALL_QWEN3, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    del small["num_experts"]
    config = write({**small, key: 4})

    found = {}
    for spec in param_specs(config):
        block, is_expert, rest = spec.name.partition(".mlp.experts.")
        number, _, part = rest.partition(".")
        assert spec.group == ("expert" if is_expert else "dense")
        if not is_expert:
            found[spec.name] = spec.shape
        elif part == "down_proj.weight":
            found[f"{block}{is_expert}down_proj"] = (int(number) + 1, *spec.shape)
        else:  # gate_proj and up_proj, one above the other
            found[f"{block}{is_expert}gate_up_proj"] = (int(number) + 1, 2 * spec.shape[0], spec.shape[1])
    assert found == dict(parameters_of_transformers(config))


def test_an_untied_gpt_2_has_a_head_and_a_feed_forward_width_may_be_given(write):
    specs = param_specs(write({**GPT2, "tie_word_embeddings": False, "n_inner": 100}))

    assert (specs[-1].name, specs[-1].shape) == ("lm_head.weight", (50_257, 768))
    assert {spec.shape for spec in specs if spec.name.endswith("c_fc.weight")} == {(768, 100)}


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        # What the library fills in where the file has nothing, or null.
        ({**LLAMA2_7B, "num_key_value_heads": None}, {"num_kv_heads": None, "tied_embeddings": False}),
        ({**LLAMA2_7B, "attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ({**LLAMA2_7B, "head_dim": 64}, {"head_size": 64}),
        ({key: value for key, value in MISTRAL_7B.items() if key != "num_key_value_heads"}, {"num_kv_heads": 8}),
        (QWEN25_7B, {"qkv_bias": True, "output_bias": False, "dtype": "float32"}),
        ({**QWEN25_7B, "dtype": "bfloat16", "torch_dtype": "float16"}, {"dtype": "bfloat16"}),
        ({**QWEN25_7B, "torch_dtype": "torch.float16"}, {"dtype": "float16"}),
    ],
)
def test_what_the_file_says_and_leaves_out_becomes_a_llama(write, data, fields):
    decoder = read_hf_config(write(data))

    assert isinstance(decoder, LlamaConfig)
    assert {name: getattr(decoder, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("data", "notice"),
    [
        (
            {**{key: value for key, value in MISTRAL_7B.items() if key != "num_key_value_heads"}, "num_key_value_head": 4},
            (
                "read vocab_size, num_hidden_layers, hidden_size, num_attention_heads, intermediate_size, tie_word_embeddings, "
                "torch_dtype; not given, so the default counts: num_key_value_heads=8, head_dim=null"
            ),
        ),
        (
            GPT2,
            (
                "read vocab_size, n_positions, n_layer, n_embd, n_head; not given, so the default counts: n_inner=null, "
                'tie_word_embeddings=true, add_cross_attention=false, dtype="float32"'
            ),
        ),
        (
            DEEPSEEK_V3,
            (
                "read vocab_size, num_hidden_layers, hidden_size, num_attention_heads, num_experts_per_tok, "
                "moe_intermediate_size, n_routed_experts, n_shared_experts, first_k_dense_replace, intermediate_size, "
                "q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, torch_dtype; "
                "not given, so the default counts: tie_word_embeddings=false, moe_layer_freq=1, attention_bias=false"
            ),
        ),
    ],
    ids=["misspelt", "gpt2", "deepseek"],
)
def test_what_was_read_and_what_was_left_to_a_default_is_told_once(write, caplog, data, notice):
    config = write(data)

    read_hf_config(config)
    read_hf_config(config)

    assert [record.getMessage() for record in caplog.records] == [f"megabucket: {config.path}: {notice}"]


def test_a_mixture_of_experts_keeps_what_its_tokens_pass(write):
    decoder = read_hf_config(write(DEEPSEEK_V3))

    assert isinstance(decoder, MoeConfig)
    assert (decoder.num_experts_per_token, decoder.num_experts, decoder.num_dense_layers) == (8, 256, 3)
    assert isinstance(decoder_of(write(GPT2)), GptConfig)


def test_the_dtype_may_be_said_in_the_config(write):
    config = write(DEEPSEEK_V3).model_copy(update={"dtype": "float16"})

    assert {spec.dtype for spec in param_specs(config)} == {"float16"}


def test_a_run_config_names_the_file(write, tmp_path):
    path = write(SMOLLM2_360M).path
    (tmp_path / "run.yaml").write_text(f"model: {{kind: hf_config, path: {path}}}")

    specs = param_specs(load_config(tmp_path / "run.yaml").model)

    assert (len(specs), specs[0].name, specs[0].dtype) == (290, "model.embed_tokens.weight", "bfloat16")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {**LLAMA2_7B, "model_type": "bert"},
            (
                "config.json: model_type 'bert' is not known; known are gpt2, llama, mistral, mixtral, qwen2, qwen3, "
                "qwen3_moe, deepseek_v2, deepseek_v3. Describe another model by kind: llama, moe, params or factory"
            ),
        ),
        (
            {"hidden_size": 8},
            (
                "config.json: model_type None is not known; known are gpt2, llama, mistral, mixtral, qwen2, qwen3, "
                "qwen3_moe, deepseek_v2, deepseek_v3. "
                "Describe another model by kind: llama, moe, params or factory"
            ),
        ),
        (
            {"model_type": ["llama"]},
            (
                "config.json: model_type ['llama'] is not known; known are gpt2, llama, mistral, mixtral, qwen2, qwen3, "
                "qwen3_moe, deepseek_v2, deepseek_v3. Describe another model by kind: llama, moe, params or factory"
            ),
        ),
        (
            {"model_type": "llama", "hidden_size": 8, "vocab_size": None},
            (
                "config.json: vocab_size is missing; num_hidden_layers is missing; num_attention_heads is missing; "
                "intermediate_size is missing"
            ),
        ),
        (
            {**LLAMA2_7B, "num_hidden_layers": -1, "torch_dtype": "float8"},
            (
                "config.json: num_hidden_layers should be greater than 0 (got -1); dtype should be 'float32', 'bfloat16', "
                "'float16' or 'float64' (got 'float8')"
            ),
        ),
        ({**LLAMA2_7B, "hidden_size": 100}, "config.json: hidden_size=100 is not a multiple of num_heads=32"),
        (
            {**DEEPSEEK_V3, "moe_layer_freq": 2},
            (
                "config.json: moe_layer_freq=2 is not known for model_type deepseek_v3, only 1. Describe the model by kind: "
                "params or factory"
            ),
        ),
        (
            {**DEEPSEEK_V3, "kv_lora_rank": "wide"},
            "config.json: kv_lora_rank 'wide' is not a count; write 40000000, 4e7 or 40M",
        ),
        (
            {**QWEN3_30B_A3B, "mlp_only_layers": [0]},
            "config.json: mlp_only_layers=[0] is not known for model_type qwen3_moe, only []. Describe the model by kind: ",
        ),
        ({**GPT2, "add_cross_attention": True}, "config.json: add_cross_attention=True is not known for model_type gpt2"),
        ([1], "config.json: a config.json holds an object with keys such as model_type, not list"),
        ("{", "config.json: not valid JSON: Expecting property name enclosed in double quotes"),
        (" " * 2_000_000, "config.json: larger than 1048576 bytes, the limit for a config.json"),
    ],
)
def test_a_file_that_describes_no_known_model_is_refused(write, data, text):
    assert refusal(write(data)).startswith(text)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError) as caught:
        param_specs(HfConfig(kind="hf_config", path="missing/config.json"))

    assert str(caught.value) == "missing/config.json: cannot be read: No such file or directory"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70_000) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    data=st.sampled_from([GPT2, LLAMA2_7B, MIXTRAL_8X7B, DEEPSEEK_V2_LITE]).flatmap(
        lambda file: st.tuples(st.just(file), st.sampled_from(sorted(file)), JSON_VALUES)
    )
)
def test_any_value_anywhere_is_taken_or_refused_by_name(tmp_path_factory, data):
    file, key, value = data
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({**file, key: value}))

    try:
        decoder = read_hf_config(HfConfig(kind="hf_config", path=str(path)))
    except ConfigError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - both outcomes are right
        return

    assert isinstance(decoder, GptConfig | LlamaConfig | MoeConfig)
