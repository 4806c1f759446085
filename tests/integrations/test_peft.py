"""Adapters of peft over a frozen Hugging Face model, against one process that sees all samples: ``make frameworks``."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed: make frameworks installs it")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402 - after the line that says how to install it

import megabucket as mb  # noqa: E402
from megabucket.testing import LoopbackWorld  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]  # what peft warns of is not about us

NUM_RANKS, NUM_STEPS, VOCABULARY = 2, 4, 64


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


def samples(step):
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))


def adamw(module):
    return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)


def train(model, optimizer, steps, *, rank=0, size=1):
    for step in steps:
        tokens = samples(step).chunk(size)[rank]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unfreeze(module):
    """Make the head trainable, and return it."""
    return module.get_output_embeddings().weight.requires_grad_(True)


@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_train_save_and_unfreeze_as_in_one_process(sharded, tmp_path):
    original = make_model()
    frozen = {name: value.clone() for name, value in original.state_dict().items() if "lora" not in name}

    def play(rank):
        module = copy.deepcopy(original)
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        model = mb.DistributedDataParallel(module, config, communicator=world.communicator(rank))
        optimizer = adamw(module)
        if sharded:
            optimizer = mb.DistributedOptimizer(optimizer, model)
        assert all("lora" in name for name in model.param_names.values())
        train(model, optimizer, range(NUM_STEPS), rank=rank, size=NUM_RANKS)
        if rank == 0:
            model.save_pretrained(tmp_path)
        adapted = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.add_param_group({"params": [unfreeze(module)], "lr": 1e-3})
        model.rebuild()
        train(model, optimizer, range(NUM_STEPS, 2 * NUM_STEPS), rank=rank, size=NUM_RANKS)
        return adapted, {name: value.clone() for name, value in model.state_dict().items()}

    world = LoopbackWorld(NUM_RANKS, timeout_s=60)
    expected = copy.deepcopy(original)
    optimizer = adamw(expected)
    train(expected, optimizer, range(NUM_STEPS))
    adapted = {name: value.clone() for name, value in expected.state_dict().items()}
    optimizer.add_param_group({"params": [unfreeze(expected)], "lr": 1e-3})
    train(expected, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))

    for found_adapted, found in world.run(play):
        torch.testing.assert_close(found_adapted, adapted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, expected.state_dict(), rtol=1e-4, atol=1e-4)
        assert all(torch.equal(found_adapted[name], value) for name, value in frozen.items())
    saved = peft.PeftModel.from_pretrained(original.get_base_model(), tmp_path)
    assert saved.peft_config["default"].r == 4
    written = peft.load_peft_weights(str(tmp_path))
    assert len(written) == 8
    for name, value in written.items():
        torch.testing.assert_close(value, adapted[name.replace(".weight", ".default.weight")], rtol=1e-4, atol=1e-5)
