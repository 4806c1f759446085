"""Every error this library raises on purpose; nothing else here.

Each class carries its facts as attributes, so tests and tools never parse text; the text says what happened with
names and values, why it matters, and what to do. All of them pickle, so they cross process boundaries.

::

    MegabucketError
    ├── ConfigError (ValueError)               a config that cannot be honoured
    ├── LayoutError (ValueError)               parameters or numbers a layout cannot be built from
    ├── UnsupportedParameterError (ValueError) a parameter the buffers cannot hold
    ├── NoTrainableParametersError (ValueError)
    ├── AlreadyWrappedError (ValueError)       a parameter that another wrapper holds
    ├── OptimizerParametersError (ValueError)  optimizer and wrapper disagree about the parameters
    ├── ProcessGroupMissingError (RuntimeError)
    ├── RanksDisagreeError (RuntimeError)      the ranks are not doing the same
    │   ├── LayoutMismatchError                different models, optimizers, configs or versions when wrapping
    │   ├── StepMismatchError                  a rank skipped or dropped a step
    │   ├── MicrobatchMismatchError            different numbers of backwards in a step
    │   ├── ScheduleMismatchError              different collectives for the same step
    │   ├── HyperparameterMismatchError        different learning rates, say, before an update
    │   └── ReplicasDivergedError              different optimizer updates, or different weights
    ├── PhaseError (RuntimeError)              an operation in a phase where it is not allowed
    │   ├── LateGradientError                  a gradient for a bucket that was already sent
    │   ├── ConcurrentBackwardError            two threads in backward of one wrapper
    │   └── UnreducedGradientsError            an optimizer step without a gradient sync before it
    ├── UnusedParameterError (RuntimeError)    a parameter without a gradient at the gradient sync
    ├── NonFiniteGradientError (ArithmeticError) nan or inf in a gradient
    ├── ModelChangedError (RuntimeError)       the module is not the one that was wrapped
    │   ├── StorageMovedError                  a parameter that no longer lives in its buffer
    │   ├── TrainabilityChangedError           frozen or unfrozen after wrapping
    │   ├── ParametersChangedError             parameters added, removed or replaced after wrapping
    │   └── DetachedGradError                  a main_grad that is not the place in the buffer
    ├── PeerFailedError (RuntimeError)         a rank could not finish the step
    ├── PeerLostError (RuntimeError)           a rank died or froze
    ├── ForkedProcessError (RuntimeError)      a collective in a forked child
    ├── GroupDestroyedError (RuntimeError)     the process group is gone
    ├── PlainOptimizerError (RuntimeError)     a plain optimizer stepping on reduce-scattered gradients
    ├── MixedDtypeOptimizerError (RuntimeError) a plain optimizer that cannot mix parameter and gradient dtypes
    ├── CollectiveError (RuntimeError)
    │   ├── MismatchedCollectiveError          ranks launched different collectives
    │   ├── CollectiveDeadlockError            a wait that can never end
    │   └── InFlightWriteError                 a buffer changed while a collective owned it
    ├── CheckpointError (RuntimeError)         a checkpoint that cannot be written or read
    │   ├── CheckpointNotSavedError            a save that failed on some rank
    │   ├── CheckpointInvalidError             files that are not what was written
    │   ├── CheckpointMissingError             no such checkpoint
    │   └── CheckpointMismatchError            a checkpoint of another model
    ├── CheckpointUnavailableError (RuntimeError) flat shards asked for as the state of a model
    ├── CorpusError (RuntimeError)             the training data cannot be read
    └── InvariantError (RuntimeError)          a bug of ours
"""

from megabucket.errors.base import (
    MegabucketError,
    name_list,
    rank_list,
    values_by_rank,
)
from megabucket.errors.checkpoint import (
    CheckpointError,
    CheckpointInvalidError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointNotSavedError,
    CheckpointUnavailableError,
)
from megabucket.errors.group import (
    CollectiveDeadlockError,
    CollectiveError,
    ForkedProcessError,
    GroupDestroyedError,
    InFlightWriteError,
    MismatchedCollectiveError,
    PeerLostError,
)
from megabucket.errors.setup import (
    AlreadyWrappedError,
    ConfigError,
    CorpusError,
    InvariantError,
    LayoutError,
    MixedDtypeOptimizerError,
    NoTrainableParametersError,
    OptimizerParametersError,
    PlainOptimizerError,
    ProcessGroupMissingError,
    UnsupportedParameterError,
)
from megabucket.errors.step import (
    ConcurrentBackwardError,
    DetachedGradError,
    HyperparameterMismatchError,
    LateGradientError,
    LayoutMismatchError,
    MicrobatchMismatchError,
    ModelChangedError,
    NonFiniteGradientError,
    ParametersChangedError,
    PeerFailedError,
    PhaseError,
    RanksDisagreeError,
    ReplicasDivergedError,
    ScheduleMismatchError,
    StepMismatchError,
    StorageMovedError,
    TrainabilityChangedError,
    UnreducedGradientsError,
    UnusedParameterError,
)

__all__ = [
    "AlreadyWrappedError",
    "CheckpointError",
    "CheckpointInvalidError",
    "CheckpointMismatchError",
    "CheckpointMissingError",
    "CheckpointNotSavedError",
    "CheckpointUnavailableError",
    "CollectiveDeadlockError",
    "CollectiveError",
    "ConcurrentBackwardError",
    "ConfigError",
    "CorpusError",
    "DetachedGradError",
    "ForkedProcessError",
    "GroupDestroyedError",
    "HyperparameterMismatchError",
    "InFlightWriteError",
    "InvariantError",
    "LateGradientError",
    "LayoutError",
    "LayoutMismatchError",
    "MegabucketError",
    "MicrobatchMismatchError",
    "MismatchedCollectiveError",
    "MixedDtypeOptimizerError",
    "ModelChangedError",
    "NoTrainableParametersError",
    "NonFiniteGradientError",
    "OptimizerParametersError",
    "ParametersChangedError",
    "PeerFailedError",
    "PeerLostError",
    "PhaseError",
    "PlainOptimizerError",
    "ProcessGroupMissingError",
    "RanksDisagreeError",
    "ReplicasDivergedError",
    "ScheduleMismatchError",
    "StepMismatchError",
    "StorageMovedError",
    "TrainabilityChangedError",
    "UnreducedGradientsError",
    "UnsupportedParameterError",
    "UnusedParameterError",
    "name_list",
    "rank_list",
    "values_by_rank",
]
