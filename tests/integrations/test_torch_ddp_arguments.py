"""Arguments of torch DDP that frameworks pass on: one is taken, others are refused by name."""

import inspect

import pytest
import torch

import megabucket as mb
from megabucket.errors import ConfigError
from megabucket.integrations import with_torch_arguments

ZERO = mb.DistributedDataParallelConfig(unused_parameters="zero")
ALL_REDUCE = mb.DistributedDataParallelConfig(use_distributed_optimizer=False, bucket_cap_mb=3)


class TestMapping:
    def test_find_unused_parameters_skips_them_under_the_default_config(self):
        config = with_torch_arguments(None, {"find_unused_parameters": True})

        assert config.use_distributed_optimizer
        assert config.unused_parameters == "skip"

    def test_the_rest_of_a_config_stays(self):
        config = with_torch_arguments(ALL_REDUCE, {"find_unused_parameters": True})

        assert config == ALL_REDUCE.model_copy(update={"unused_parameters": "skip"})
        assert with_torch_arguments(config, {"find_unused_parameters": True}) == config

    @pytest.mark.parametrize("given", [{}, {"find_unused_parameters": False}])
    @pytest.mark.parametrize("config", [None, ZERO])
    def test_without_it_nothing_changes(self, config, given):
        assert with_torch_arguments(config, given) is config

    def test_a_contradiction_is_refused(self):
        with pytest.raises(ConfigError) as caught:
            with_torch_arguments(ZERO, {"find_unused_parameters": True}, prefix="ddp_")

        assert str(caught.value) == (
            "ddp_find_unused_parameters=True means unused_parameters='skip', and the config has unused_parameters='zero': keep "
            "one of them."
        )

    def test_others_are_refused_by_their_names_in_the_framework(self):
        with pytest.raises(ConfigError, match=r"^ddp_broadcast_buffers, ddp_bucket_cap_mb: these are arguments of torch DDP"):
            with_torch_arguments(
                None, {"broadcast_buffers": True, "find_unused_parameters": True, "bucket_cap_mb": 3}, prefix="ddp_"
            )

    @pytest.mark.parametrize("config", [None, ZERO])
    def test_what_happens_anyway_changes_nothing(self, config):
        given = {"static_graph": True, "broadcast_buffers": False, "gradient_as_bucket_view": True}

        assert with_torch_arguments(config, given) is config


@pytest.mark.parametrize("name", ["MegabucketStrategy", "MegabucketFabricStrategy"])
class TestLightning:
    def strategy(self, name, *args, **kwargs):
        pytest.importorskip("lightning", reason="lightning is not installed: make frameworks installs it")
        from megabucket.integrations import lightning

        return getattr(lightning, name)(*args, **kwargs)

    def test_it_is_taken(self, name):
        assert self.strategy(name, ALL_REDUCE, find_unused_parameters=True).config.unused_parameters == "skip"

    def test_others_are_refused(self, name):
        with pytest.raises(ConfigError, match=r"^bucket_cap_mb, mixed_precision: these are arguments of torch DDP"):
            self.strategy(name, bucket_cap_mb=3, mixed_precision=object(), static_graph=True)

    def test_defaults_which_lightning_cli_passes_one_and_all_are_not_mistaken_for_arguments(self, name):
        parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}

        assert defaults["find_unused_parameters"] is False
        assert self.strategy(name, **defaults).config is None


class TestAccelerate:
    def accelerator(self, ddp_config=None, **kwargs):
        pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
        from accelerate.utils import DistributedDataParallelKwargs

        from megabucket.integrations.transformers import MegabucketAccelerator

        handler = DistributedDataParallelKwargs(**kwargs)
        return MegabucketAccelerator(cpu=True, ddp_config=ddp_config, kwargs_handlers=[handler])

    def test_it_is_taken(self):
        assert self.accelerator(ALL_REDUCE, find_unused_parameters=True).ddp_config.unused_parameters == "skip"
        assert self.accelerator(ALL_REDUCE).ddp_config is ALL_REDUCE

    def test_others_are_refused(self):
        pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
        from accelerate.utils import DDPCommunicationHookType

        with pytest.raises(ConfigError, match=r"^bucket_cap_mb, comm_hook: these are arguments of torch DDP"):
            self.accelerator(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType.FP16)


class TestTrainer:
    def trainer(self, folder, ddp_config=None, **kwargs):
        pytest.importorskip("accelerate", reason="accelerate is not installed: make frameworks installs it")
        from transformers import TrainingArguments

        from megabucket.integrations.transformers import MegabucketTrainer

        args = TrainingArguments(str(folder), use_cpu=True, report_to=[], **kwargs)
        return MegabucketTrainer(model=torch.nn.Linear(2, 1), args=args, ddp_config=ddp_config)

    def test_it_is_taken(self, tmp_path):
        trainer = self.trainer(tmp_path, ALL_REDUCE, ddp_find_unused_parameters=True)

        assert trainer.accelerator.ddp_config.unused_parameters == "skip"

    def test_without_it_the_config_stays_although_transformers_asks_torch_ddp_for_it(self, tmp_path):
        assert self.trainer(tmp_path, ALL_REDUCE).accelerator.ddp_config is ALL_REDUCE
        assert self.trainer(tmp_path, ALL_REDUCE, ddp_find_unused_parameters=False).accelerator.ddp_config is ALL_REDUCE

    def test_others_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"^ddp_broadcast_buffers: these are arguments of torch DDP"):
            self.trainer(tmp_path, ddp_broadcast_buffers=True)
