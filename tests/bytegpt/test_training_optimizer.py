import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.bytegpt.config import OptimizerConfig
from examples.bytegpt.model import ByteGPT
from examples.bytegpt.task import learning_rate, make_optimizers
from megabucket.planning.model_config import GptConfig


def params():
    return [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]


def make_optimizer(config, params):
    (optimizer,) = make_optimizers(config, {f"{index}": param for index, param in enumerate(params)})
    return optimizer


def test_only_parameters_with_two_dimensions_decay():
    matrix, vector = params()

    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), [matrix, vector])

    assert [(group["params"], group["weight_decay"]) for group in optimizer.param_groups] == [([matrix], 0.1), ([vector], 0.0)]


def test_without_weight_decay_there_is_one_group():
    matrix, vector = params()

    (group,) = make_optimizer(OptimizerConfig(), [matrix, vector]).param_groups

    assert group["params"] == [matrix, vector]


def test_a_group_that_would_be_empty_is_left_out():
    matrix, _ = params()

    assert len(make_optimizer(OptimizerConfig(weight_decay=0.1), [matrix]).param_groups) == 1


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = ByteGPT(
        GptConfig(
            kind="gpt", vocab_size=32, num_layers=2, hidden_size=8, num_heads=2, sequence_length=4, tied_embeddings=False
        ),
        seed=0,
    )
    names = {param: name for name, param in model.named_parameters()}

    muon, adamw = make_optimizers(OptimizerConfig(name="muon", lr=0.1, muon_lr=0.2), dict(model.named_parameters()))

    matrices = [names[param] for group in muon.param_groups for param in group["params"]]
    rest = [names[param] for group in adamw.param_groups for param in group["params"]]
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert len(matrices) == 2 * 4  # qkv, projection, up and down of each block
    assert all(name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name for name in matrices)
    assert {"token_embedding.weight", "position_embedding.weight", "head.weight", "final_norm.weight"} < set(rest)
    assert sorted(matrices + rest) == sorted(names.values())
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.2, 0.1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"name": "adamw"}, torch.optim.AdamW),
        ({"name": "adam"}, torch.optim.Adam),
        ({"name": "sgd"}, torch.optim.SGD),
        ({"name": "sgd", "momentum": 0.9}, torch.optim.SGD),
    ],
)
def test_the_number_of_moments_is_what_the_optimizer_keeps(config, kind, fused):
    config = OptimizerConfig(**config, fused=fused)
    matrix, _ = params()
    optimizer = make_optimizer(config, [matrix])
    matrix.grad = torch.ones_like(matrix)

    optimizer.step()

    moments = [value for value in optimizer.state[matrix].values() if value is not None and value.shape == matrix.shape]
    assert type(optimizer) is kind
    assert len(moments) == config.moments_per_element


@given(
    num_steps=st.integers(1, 300),
    warmup=st.integers(0, 100),
    final=st.floats(0, 1),
    lr=st.floats(1e-6, 10),
)
def test_the_rate_rises_to_its_peak_then_never_rises_and_ends_at_its_fraction(num_steps, warmup, final, lr):
    config = OptimizerConfig(lr=lr, warmup_steps=warmup, final_lr_fraction=final)

    rates = [learning_rate(config, step=step, num_steps=num_steps) for step in range(num_steps)]

    slack = 1e-9 * lr
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(0 < rate <= lr for rate in rising)
    assert all(final * lr - slack <= rate <= lr + slack for rate in falling)
    assert all(later >= earlier for earlier, later in itertools.pairwise(rising))
    assert all(later <= earlier + slack for earlier, later in itertools.pairwise(falling))
    if falling:
        assert falling[-1] == pytest.approx(final * lr)
