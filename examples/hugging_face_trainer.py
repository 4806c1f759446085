"""The Hugging Face Trainer with megabucket: a small random Llama, accumulation, clipping, a checkpoint, from_pretrained.

torchrun --standalone --nproc-per-node 2 examples/hugging_face_trainer.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megabucket.integrations.transformers import MegabucketTrainer

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def make_trainer(folder: Path) -> MegabucketTrainer:
    torch.manual_seed(0)
    tokens = (torch.arange(256).unsqueeze(1) + torch.arange(16)) % 64  # each token is the one before, plus one
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        bf16=True,
        save_steps=10,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return MegabucketTrainer(model=LlamaForCausalLM(CONFIG), args=args, train_dataset=data)


def main() -> None:
    dist.init_process_group("gloo")
    roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(roots)
    root = Path(roots[0])
    whole, resumed = make_trainer(root), make_trainer(root / "again")
    whole.train()
    resumed.train(resume_from_checkpoint=str(root / "checkpoint-10"))  # on any number of ranks
    whole.save_model(str(root / "final"))
    dist.barrier()  # the first rank has written it
    final = LlamaForCausalLM.from_pretrained(root / "final").state_dict()
    same = all(torch.equal(value, final[name]) for name, value in resumed.model.state_dict().items())
    if dist.get_rank() == 0:
        print(f"saved after 10 of 20 steps, resumed, and loaded by from_pretrained: the same weights, bit by bit: {same}")
    dist.barrier()
    dist.destroy_process_group()
    assert same


if __name__ == "__main__":
    main()
