import pytest
import torch

from examples.bytegpt.model import ByteGPT, next_byte_loss
from megabucket.planning.architecture import param_specs
from megabucket.planning.model_config import GptConfig


def tiny(**changes):
    sizes = {"vocab_size": 256, "sequence_length": 8, "num_layers": 2, "hidden_size": 12, "num_heads": 3}
    return GptConfig(kind="gpt", **{**sizes, **changes})


@pytest.mark.parametrize(
    "config",
    [tiny(), tiny(bias=False), tiny(tied_embeddings=False), tiny(ffn_size=20), tiny(num_layers=1)],
)
def test_parameters_are_those_that_planning_expects(config):
    model = ByteGPT(config, seed=0)

    built = [(name, tuple(param.shape)) for name, param in model.named_parameters()]

    assert built == [(spec.name, spec.shape) for spec in param_specs(config)]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (ByteGPT(tiny(), seed=seed).state_dict() for seed in (1, 1, 2))

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_building_a_model_draws_nothing_that_depends_on_the_global_seed():
    torch.manual_seed(3)
    first = ByteGPT(tiny(), seed=0).state_dict()
    torch.manual_seed(4)
    second = ByteGPT(tiny(), seed=0).state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_byte_sees_those_after_it():
    model = ByteGPT(tiny(), seed=0)
    tokens = torch.arange(8)[None, :]
    changed = tokens.clone()
    changed[0, 5] = 200

    before, after = model(tokens), model(changed)

    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_a_fresh_model_knows_nothing_about_the_next_byte():
    inputs = torch.randint(0, 256, (4, 8), generator=torch.Generator().manual_seed(0))

    loss = next_byte_loss(ByteGPT(tiny(tied_embeddings=False), seed=0), inputs, inputs.roll(-1, dims=1))

    assert loss.item() == pytest.approx(5.545, abs=0.01)  # ln 256


def test_the_loss_of_a_bfloat16_model_is_float32():
    inputs = torch.zeros(2, 8, dtype=torch.int64)

    loss = next_byte_loss(ByteGPT(tiny(), seed=0).bfloat16(), inputs, inputs)

    assert loss.dtype is torch.float32
