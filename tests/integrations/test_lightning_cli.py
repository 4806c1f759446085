"""``LightningCLI`` makes the strategy from YAML, with a value for every argument of ``DDPStrategy``: ``make frameworks``."""

import pytest
import torch
import torch.distributed as dist

lightning = pytest.importorskip("lightning", reason="lightning is not installed: make frameworks installs it")
pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: make frameworks installs it")

from lightning.pytorch.cli import LightningCLI  # noqa: E402 - after the lines that say how to install it

import megabucket as mb  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]  # what Lightning warns of is not about us

TRAINER = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: {strategy}
"""
STRATEGY = "{{class_path: megabucket.integrations.lightning.MegabucketStrategy, init_args: {{{}}}}}"


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(2)), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Yield a function that returns the strategy that a text of YAML names, and the weights after training with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py"])

    def run(strategy):
        (tmp_path / "run.yaml").write_text(TRAINER.format(strategy=strategy))
        cli = LightningCLI(Regression, args=["fit", "--config", "run.yaml"], save_config_callback=None)
        return cli.trainer.strategy, cli.model.state_dict()

    yield run
    if dist.is_initialized():  # Lightning keeps it until the program ends
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("", None),
        (
            "config: {use_distributed_optimizer: true, bucket_cap_mb: 25}",
            {"use_distributed_optimizer": True, "bucket_cap_mb": 25},
        ),
        (
            "config: {use_distributed_optimizer: true, bucket_cuts: [net.0.weight]}, process_group_backend: gloo",
            {"use_distributed_optimizer": True, "bucket_cuts": ("net.0.weight",)},
        ),
        ("config: {use_distributed_optimizer: false, num_buckets: 2}, static_graph: true", {"num_buckets": 2}),
        ("find_unused_parameters: true", {"use_distributed_optimizer": True, "unused_parameters": "skip"}),
    ],
)
def test_the_config_of_the_yaml_trains_to_the_weights_of_ddp(fit, arguments, fields):
    strategy, weights = fit(STRATEGY.format(arguments))
    _, expected = fit("ddp")

    assert strategy.config == (fields and mb.DistributedDataParallelConfig(**fields))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_an_argument_that_is_torch_ddps_is_refused_by_its_name(fit):
    # Of jsonargparse, with our text in it.
    with pytest.raises(ValueError, match=r"bucket_cap_mb: these are arguments of torch DDP. Give the adapter a Distrib"):
        fit(STRATEGY.format("bucket_cap_mb: 3"))
