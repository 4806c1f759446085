"""A Llama in the wrapper: ``generate`` and ``save_pretrained`` right after a step, while its parameters are gathered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Rank, WorkerPool

import megabucket as mb

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

pytestmark = pytest.mark.dist

STEPS = 3
VOCABULARY = 61


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: Rank, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Return the tokens of the wrapped model and of ``from_pretrained``, and how far weights are from plain training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=2_000)
    ddp = mb.DistributedDataParallel(model, config, process_group=rank.group)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    said, said_again = [], []
    for step in range(STEPS):
        ddp(input_ids=tokens_of(rank.index, step), labels=tokens_of(rank.index, step)).loss.backward()
        optimizer.step()
        if rank.index == 0:
            ddp.save_pretrained(f"{folder}/{step}")
        said.append(ddp.generate(tokens_of(0, step)[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0))
        optimizer.zero_grad()
        losses = [plain(input_ids=tokens, labels=tokens).loss for tokens in (tokens_of(number, step) for number in range(2))]
        (sum(losses) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        if rank.index == 0:
            again = LlamaForCausalLM.from_pretrained(f"{folder}/{step}")
            assert again.lm_head.weight is again.model.embed_tokens.weight
            said_again.append(again.generate(tokens_of(0, step)[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0))
    distances = []
    for name, value in ddp.state_dict().items():
        expected = plain.state_dict()[name]
        distances.append(float((value - expected).abs().max() / (expected - before[name]).abs().max()))
        assert rank.index or torch.equal(again.state_dict()[name], value), name
    ddp.detach()
    return said, said_again, distances


def test_generate_and_save_pretrained_wait_for_the_parameters_of_the_step_before(pool: WorkerPool, tmp_path: Path) -> None:
    (said, said_again, distances), (said_by_second, _, _) = pool.run(train, str(tmp_path), ranks=2)

    assert len(said_again) == STEPS
    assert all(torch.equal(*pair) for pair in zip(said, said_again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(said, said_by_second, strict=True))
    assert max(distances) <= 1e-4
