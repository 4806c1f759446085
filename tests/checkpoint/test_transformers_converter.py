"""An export is what ``transformers`` loads. Skipped where that library is not installed; it is not needed for anything else."""

import pytest
import torch

import megabucket as mb
from megabucket.checkpoint.convert.huggingface import export_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000], ids=["one_file", "several"])
def test_from_pretrained_gives_the_model_that_was_saved(tmp_path, max_file_bytes):
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=97)
    model = transformers.GPT2LMHeadModel(config).eval()
    ddp = mb.DistributedDataParallel(model, mb.DistributedDataParallelConfig(use_distributed_optimizer=True))
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), ddp)
    tokens = torch.randint(0, 97, (2, 8))
    ddp(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mb.save_checkpoint(tmp_path / "run", ddp, optimizer, step=1)

    files = export_weights(mb.open_checkpoint(tmp_path / "run"), tmp_path / "export", max_file_bytes=max_file_bytes)
    config.save_pretrained(tmp_path / "export")
    again, found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export", output_loading_info=True)

    assert (len(files) > 2) == (max_file_bytes == 40_000)
    assert not any(found.values())
    assert again.lm_head.weight is again.transformer.wte.weight
    for name, param in model.named_parameters():
        assert torch.equal(again.get_parameter(name), param), name
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
