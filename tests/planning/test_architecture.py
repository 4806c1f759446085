"""Parameters of the built-in architectures, of lists and of factories."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megabucket.errors import ConfigError, LayoutError
from megabucket.layout import ParamSpec
from megabucket.planning import RunConfig, load_config, param_specs
from megabucket.planning.model_config import FactoryConfig, GptConfig, LlamaConfig, ParamListConfig


def named(specs):
    return [(spec.name, spec.shape) for spec in specs]


# Names, shapes and order


def test_a_gpt_has_its_parameters_in_registration_order():
    config = GptConfig(kind="gpt", vocab_size=256, sequence_length=8, num_layers=1, hidden_size=4, num_heads=2)

    assert named(param_specs(config)) == [
        ("token_embedding.weight", (256, 4)),
        ("position_embedding.weight", (8, 4)),
        ("blocks.0.attention_norm.weight", (4,)),
        ("blocks.0.attention_norm.bias", (4,)),
        ("blocks.0.attention.qkv.weight", (12, 4)),
        ("blocks.0.attention.qkv.bias", (12,)),
        ("blocks.0.attention.projection.weight", (4, 4)),
        ("blocks.0.attention.projection.bias", (4,)),
        ("blocks.0.mlp_norm.weight", (4,)),
        ("blocks.0.mlp_norm.bias", (4,)),
        ("blocks.0.mlp.up.weight", (16, 4)),
        ("blocks.0.mlp.up.bias", (16,)),
        ("blocks.0.mlp.down.weight", (4, 16)),
        ("blocks.0.mlp.down.bias", (4,)),
        ("final_norm.weight", (4,)),
        ("final_norm.bias", (4,)),
    ]


def test_an_untied_gpt_without_biases_has_a_head_and_weights_only():
    config = GptConfig(
        kind="gpt",
        vocab_size=256,
        sequence_length=8,
        num_layers=1,
        hidden_size=4,
        num_heads=2,
        ffn_size=6,
        bias=False,
        tied_embeddings=False,
        dtype="bfloat16",
    )

    specs = param_specs(config)

    assert specs[-1] == ParamSpec("head.weight", (256, 4), "bfloat16")
    assert [spec.shape for spec in specs if "mlp." in spec.name] == [(6, 4), (4, 6)]
    assert not [spec.name for spec in specs if spec.name.endswith("bias")]


@pytest.mark.parametrize(("num_kv_heads", "kv_rows"), [(None, 8), (4, 8), (2, 4), (1, 2)])
def test_a_llama_shares_key_and_value_heads(num_kv_heads, kv_rows):
    config = LlamaConfig(
        kind="llama", vocab_size=10, num_layers=1, hidden_size=8, ffn_size=6, num_heads=4, num_kv_heads=num_kv_heads
    )

    assert named(param_specs(config)) == [
        ("model.embed_tokens.weight", (10, 8)),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8)),
        ("model.layers.0.self_attn.k_proj.weight", (kv_rows, 8)),
        ("model.layers.0.self_attn.v_proj.weight", (kv_rows, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8)),
        ("model.layers.0.mlp.gate_proj.weight", (6, 8)),
        ("model.layers.0.mlp.up_proj.weight", (6, 8)),
        ("model.layers.0.mlp.down_proj.weight", (8, 6)),
        ("model.layers.0.input_layernorm.weight", (8,)),
        ("model.layers.0.post_attention_layernorm.weight", (8,)),
        ("model.norm.weight", (8,)),
        ("lm_head.weight", (10, 8)),
    ]


def test_a_tied_head_is_counted_once():
    sizes = {"vocab_size": 10, "num_layers": 1, "hidden_size": 8, "ffn_size": 6, "num_heads": 4}

    tied = param_specs(LlamaConfig(kind="llama", tied_embeddings=True, **sizes))

    assert "lm_head.weight" not in {spec.name for spec in tied}


# Lists

ENTRIES = [
    {"name": "embedding", "shape": [4, 2], "shared_embedding": True},
    {"name": "expert", "shape": [3], "group": "expert", "dtype": "float16"},
    {"name": "scale", "shape": []},
]
SPECS = [
    ParamSpec("embedding", (4, 2), "bfloat16", "dense", True),
    ParamSpec("expert", (3,), "float16", "expert"),
    ParamSpec("scale", (), "bfloat16"),
]


def test_a_list_is_taken_in_its_order():
    config = ParamListConfig.model_validate({"kind": "params", "params": ENTRIES, "dtype": "bfloat16"})

    assert param_specs(config) == SPECS


# Factories

FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=4, tie=False):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.embedding.weight.shared_embedding = True
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.expert = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.expert.weight.allreduce = False
        self.head = nn.Linear(width, 10, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

class Models:
    small = staticmethod(lambda: nn.Linear(2, 3))

def huge(): return nn.Linear(2**20, 2**24)   # 64 TiB of float32, were it not on the meta device
def broken(): raise RuntimeError("no data\\x1b[31m")
def nothing(): return 3
def frozen(): return nn.Linear(2, 2).requires_grad_(False)
def complex_one(): return nn.Linear(2, 2, dtype=torch.complex64)
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "factory_under_test.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(name, **fields):
        return FactoryConfig(kind="factory", factory=f"factory_under_test:{name}", **fields)

    yield build
    sys.modules.pop("factory_under_test", None)


def test_a_factory_gives_the_trainable_parameters_with_their_marks(factory):
    assert param_specs(factory("Model", arguments={"width": 2})) == [
        ParamSpec("embedding.weight", (10, 2), "float32", "dense", True),
        ParamSpec("expert.weight", (2, 2), "bfloat16", "expert"),
        ParamSpec("head.weight", (10, 2)),
    ]


def test_a_parameter_tied_in_a_factory_is_counted_once(factory):
    names = [spec.name for spec in param_specs(factory("Model", arguments={"tie": True}))]

    assert names == ["embedding.weight", "expert.weight"]


def test_the_dtype_of_a_factory_can_be_overridden(factory):
    assert {spec.dtype for spec in param_specs(factory("Model", dtype="float16"))} == {"float16"}


def test_a_factory_may_be_an_attribute_of_a_class(factory):
    assert named(param_specs(factory("Models.small"))) == [("weight", (3, 2)), ("bias", (3,))]


def test_a_model_larger_than_any_memory_can_be_described(factory):
    assert param_specs(factory("huge"))[0].shape == (16_777_216, 1_048_576)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("broken", {}, "cannot be used: RuntimeError: no data\\x1b[31m. It is imported and called with model.arguments"),
        ("missing", {}, "cannot be used: AttributeError: module 'factory_under_test' has no attribute 'missing'"),
        ("Model", {"widht": 2}, "cannot be used: TypeError: "),
        ("nothing", {}, "returned int; it must return a torch.nn.Module"),
        ("frozen", {}, "returned 'Linear' without trainable parameters"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused(factory, name, arguments, message):
    with pytest.raises(ConfigError) as caught:
        param_specs(factory(name, arguments=arguments))

    assert str(caught.value).startswith(f"model.factory=factory_under_test:{name} {message}")


def test_a_factory_in_a_module_that_python_does_not_find_is_refused():
    with pytest.raises(ConfigError, match="cannot be used: ModuleNotFoundError: No module named 'no_such_module'"):
        param_specs(FactoryConfig(kind="factory", factory="no_such_module:build"))


def test_a_factory_with_complex_parameters_is_refused(factory):
    with pytest.raises(LayoutError, match="dtype 'complex64' cannot be held by a buffer"):
        param_specs(factory("complex_one"))


def test_describing_a_built_in_architecture_does_not_import_torch():
    code = (
        "import sys; from megabucket.planning import load_config, param_specs; "
        "param_specs(load_config('llama3-8b').model); print('torch' in sys.modules)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("model=small.json", {"kind": "hf_config", "path": "small.json"}),
        ("model=torch.nn:Bilinear", {"kind": "factory", "factory": "torch.nn:Bilinear"}),
    ],
)
def test_a_model_may_be_named_in_one_word(short, long):
    assert load_config(None, [short]) == RunConfig.model_validate({"model": long})


def test_a_word_that_names_no_model_is_refused_with_what_would():
    with pytest.raises(ConfigError, match=r"model: 'gpt' is neither a file nor a preset"):
        load_config(None, ["model=gpt"])
