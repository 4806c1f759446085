"""``run_training``: the program behind ``megabucket train``, from a config to a summary.

Puts the parts together and holds no arithmetic of its own: corpus, model, wrapper, optimizer, steps, evaluation, figures.
All ranks call it; only the first one writes and shows anything.
"""

from __future__ import annotations

import platform
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megabucket import __version__
from megabucket.config.architecture import GptConfig
from megabucket.config.run import RunConfig
from megabucket.ddp import DistributedDataParallel
from megabucket.errors import ConfigError, CorpusError
from megabucket.optim import DistributedOptimizer
from megabucket.planning.memory import rank_memory
from megabucket.trace import Recorder, StepRecorder, StepTrace, write_chrome_trace
from megabucket.training.bytegpt import ByteGPT
from megabucket.training.compare import Comparison, Run, train_reference
from megabucket.training.corpus import Corpus, read_corpus
from megabucket.training.host import PeakMemory, loopback_bytes
from megabucket.training.launch import Launch, Ranks, joined_ranks
from megabucket.training.metrics import MetricsLog, StepOutcome, step_metrics
from megabucket.training.optimizer import learning_rate, make_optimizer, num_moments, set_learning_rate
from megabucket.training.progress import View
from megabucket.training.steps import Trainee, held_out_bits, train_step
from megabucket.training.summary import Measured, Setup, Summary, Totals
from megabucket.training.windows import Windows, held_out_starts, training_starts
