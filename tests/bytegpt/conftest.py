import json

import pytest

from examples.bytegpt.config import DemoConfig


@pytest.fixture
def corpus_directory(tmp_path):
    """Twelve small modules in two packages, which a tiny model learns in a few steps."""
    root = tmp_path / "source"
    for index in range(12):
        package = root / ("left" if index % 2 else "right")
        package.mkdir(parents=True, exist_ok=True)
        body = "".join(f"def function_{index}_{line}(argument):\n    return argument + {line}\n\n\n" for line in range(8))
        (package / f"module_{index:02}.py").write_text(body)
    return root


@pytest.fixture
def tiny_run(corpus_directory, tmp_path):
    """Return a factory of complete configs for a model of about 10,000 parameters and a run of a few steps."""

    def make(*, model=None, ddp=None, optimizer=None, train=None, data=None, checkpoint=None):
        return DemoConfig.model_validate(
            {
                "model": {
                    "kind": "gpt",
                    "vocab_size": 256,
                    "sequence_length": 16,
                    "num_layers": 1,
                    "hidden_size": 16,
                    "num_heads": 2,
                    **(model or {}),
                },
                "ddp": {"bucket_size": 2000, **(ddp or {})},
                "program": {
                    "optimizer": {"lr": 1e-2, "weight_decay": 0.1, **(optimizer or {})},
                    "data": {"corpus": str(corpus_directory), "held_out_every": 4, **(data or {})},
                    "train": {
                        "steps": 3,
                        "microbatch_size": 2,
                        "num_microbatches": 2,
                        "eval_batches": 2,
                        "log_path": str(tmp_path / "runs" / "log.jsonl"),
                        **(train or {}),
                    },
                    **({} if checkpoint is None else {"checkpoint": checkpoint}),
                },
            }
        )

    return make


@pytest.fixture
def config_file(tiny_run, tmp_path):
    """Return what writes the config of ``tiny_run``, and more sections, into a file."""

    def write(more=None, **sections):
        path = tmp_path / "run.yaml"
        data = tiny_run(**sections).model_dump(mode="json", exclude_unset=True)
        path.write_text(json.dumps({**data, **(more or {})}))
        return path

    return write
