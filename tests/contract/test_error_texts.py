"""The full text of every error class, for the examples of test_error_tree.py: what a user reads, word for word.

A text says what is wrong with names and values, why it matters, and what to do. Whoever changes one reads it here once more.
"""

import pytest
from test_error_tree import EXAMPLES

TEXTS = {
    "MegabucketError": "text",
    "ConfigError": "text",
    "LayoutError": "text",
    "UnsupportedParameterError": "parameter 'w' cannot live in a parameter and gradient buffer: it is odd. Do not.",
    "NoTrainableParametersError": (
        "Model has no parameter with requires_grad=True: its 2 parameters are all frozen ('a', 'b'), so there is "
        "nothing to reduce. Call requires_grad_(True) on what should be trained before wrapping, or use the "
        "module without a wrapper."
    ),
    "AlreadyWrappedError": (
        "'a' already belong to another DistributedDataParallel wrapper: they have a main_grad. Two of them would move the same "
        "storage and reduce the same gradients twice. Wrap each parameter once: call detach() on the first wrapper before "
        "wrapping again; if it is Megatron-Core's, build the model anew without it."
    ),
    "ForeignWrapperError": (
        "library.Wrapper, around this module, owns the gradients of 'a' as well. Each of the two would reduce gradients that "
        "the other one has reduced, or still has to, and weights would be wrong without any other error. Do not."
    ),
    "OptimizerParametersError": "something: 'a'. Do not.",
    "ProcessGroupMissingError": (
        "this process is one of 2 (WORLD_SIZE=2) but torch.distributed is not initialized, so each of them would train alone "
        "and the replicas would drift apart. Call torch.distributed.init_process_group() before wrapping the module, or pass "
        "process_group=. If this process is to train alone, unset WORLD_SIZE."
    ),
    "RanksDisagreeError": "text",
    "LayoutMismatchError": (
        "the model is not the same on all ranks: entry 3: rank 0 has a, rank 1 has b; and 3 more (4 of 9 entries "
        "differ). Values that do not belong together would be mixed. Give every rank the same model, optimizer, state, "
        "config and versions, in the same order. No rank was wrapped."
    ),
    "CallMismatchError": (
        "step 3: ranks are in different calls: save() on rank 0; step() on rank 1. Each of them needs every rank: make it on "
        "all, at the same place of the program (usual causes: `if rank == 0:` around one, and an exception caught on one "
        "rank). None of these calls has done anything, and the next call of all ranks may run."
    ),
    "StepMismatchError": (
        "step 3: dropped steps differ between ranks: 0 on rank 0; 1 on rank 1. Some rank has skipped or dropped a"
        " step that others have taken, so batches of different steps would be averaged. Make every rank take "
        "every step: a rank that cannot use its batch, or that catches an exception, calls abort_step() or "
        "ddp.zero_grad(), and all drop the step together (torch's optimizer.zero_grad() does not tell the wrapper). A "
        "forward that is not for training belongs under torch.no_grad() or module.eval(). The step was dropped on"
        " all ranks; its gradients are forgotten, and the next step may run."
    ),
    "MicrobatchMismatchError": (
        "step 3: microbatch counts differ between ranks: 2 on ranks 0, 1; 1 on rank 2. The mean would "
        "weigh them unequally. Run as many backwards per step on every rank, all but the last one inside "
        "no_sync(). The step was dropped on all ranks; its gradients are forgotten, and the next step may run."
    ),
    "ScheduleMismatchError": (
        "step 3: force_all_reduce differs between ranks: 0 on rank 0; 1 on rank 1. Ranks that launch different "
        "collectives mix unrelated data. Set it alike on every rank before backward. The step was dropped on all "
        "ranks; its gradients are forgotten, and the next step may run."
    ),
    "HyperparameterMismatchError": (
        "step 3: hyperparameters differ between ranks: lr of group 0 is 0.1 on rank 0; 0.2 on rank 1. Each rank would update "
        "its shard differently, which gathered weights do not show. Set them alike on every rank: look for a scheduler that "
        "follows a local loss, for scale_gradients() with a local count, for a loss scale or max_norm of one rank, for an "
        "optimizer's checkpoint that was loaded on one rank only. No rank has updated. The step was dropped on all ranks; "
        "its gradients are forgotten, and the next step may run."
    ),
    "ReplicasDivergedError": (
        "step 3: optimizer updates differ between ranks: 1 on rank 0; 0 on rank 1. The replicas do not hold the "
        "same weights any more, and gradients of different models would be averaged. Every rank must step after "
        "every sync: look for an exception caught around optimizer.step() on one rank. Load the last "
        "checkpoint on every rank, or call ddp.broadcast_params() and make the optimizer anew."
    ),
    "PhaseError": "text",
    "LateGradientError": (
        "step 3: on rank 1 'w' received a gradient although bucket 1 of 2 (counted from 0) is in flight. That "
        "gradient is in no reduction, so the step would be wrong. Usual causes: a second backward without "
        "zero_grad() or outside no_sync() (wrap all but the last backward of a step in no_sync()), or reentrant "
        "activation checkpointing of a layer that is used several times (pass use_reentrant=False). The step was "
        "dropped on all ranks; its gradients are forgotten, and the next step may run."
    ),
    "DelayedGradientError": (
        "step 3: on rank 1 the delayed gradient of 'w' has come 1 times in 2 backwards. Gradients of parameters with "
        "skip_backward_post_hook=True are computed apart from backward: call ddp.grad_ready(param) for each once per "
        "backward, before finish_grad_sync() or the optimizer's step. In backward return None for it, or a dummy with "
        "param.grad_added_to_main_grad = True. Remove the attribute before wrapping if autograd computes it. The step "
        "was dropped on all ranks; its gradients are forgotten, and the next step may run."
    ),
    "ConcurrentBackwardError": (
        "[rank 1] thread 'second' runs a backward while one of thread 'first' is still running. Both add into the same "
        "gradient buffer, so the sums would depend on timing. Run one backward at a time: those of several threads under a "
        "lock or with a wrapper each, one that begins inside another (in a hook) after it."
    ),
    "UnreducedGradientsError": (
        "step() was called, but the gradients are not reduced: since the last step or zero_grad(), no backward has run "
        "outside no_sync(), or finish_grad_sync() was not called where the config leaves that to the caller "
        "(finish='explicit'). Run the last backward of the step outside no_sync(), or call finish_grad_sync() yourself; "
        "clear gradients after step(), not before. To step on the gradients of one rank alone (local SGD), use the module "
        "without a wrapper."
    ),
    "UnusedParameterError": (
        "step 3: 'a' got no gradient on rank 1 of 3 ranks (first in bucket 0 of 2, counted from 0). They require "
        "grad but no backward of the step reached them, or their .grad was set to None (by a hook, or between two "
        "backwards). Freeze them with requires_grad_(False) before wrapping, use them, or "
        "set unused_parameters='skip', which is torch DDP's find_unused_parameters=True, or 'zero' to reduce zeros in their "
        "place. The step was dropped on all ranks; its "
        "gradients are forgotten, and the next step may run."
    ),
    "NonFiniteGradientError": (
        "step 3: the gradient of 'a' on rank 1 (bucket 0 of 2, counted from 0) has nan in 1 of 2 (and 1 more "
        "parameters). Reduced, it would reach every rank. No optimizer step was taken on any rank. Look at the "
        "loss and the data of that rank; set nonfinite_gradients='skip_step' to skip such steps, or 'allow' "
        "with a loss scaler such as torch.amp.GradScaler. The step was "
        "dropped on all ranks; its gradients are forgotten, and the next step may run."
    ),
    "ModelChangedError": "text",
    "StorageMovedError": (
        "step 3: on rank 1 parameters have left the buffer: 'a' (the first one is bfloat16 on cpu, expected "
        "float32 on cpu). Something moved parameters after wrapping: .to(), .half(), .bfloat16(), "
        "load_state_dict(assign=True) or `param.data =`. The optimizer would go on updating memory that the "
        "module does not read. Convert the module before wrapping and copy values with param.copy_() under "
        "no_grad(); ddp.rebuild() takes the module as it is now. The step was dropped on all ranks; its gradients"
        " are forgotten, and the next step may run."
    ),
    "TrainabilityChangedError": (
        "step 3: after wrapping, rank 1 has frozen 'a' and unfrozen 'b' (requires_grad). A frozen parameter keeps"
        " its place in the buffer and gets no gradient; the gradient of an unfrozen one is never reduced, and "
        "replicas drift apart. Call ddp.rebuild() on every rank after changing requires_grad. The step was "
        "dropped on all ranks; its gradients are forgotten, and the next step may run."
    ),
    "ParametersChangedError": (
        "step 3: after wrapping, rank 1 has added 'a' and removed 'b' and replaced 'c'. Gradients of parameters "
        "that are not in the buffers are never reduced, and the optimizer still holds the old ones. Call "
        "ddp.rebuild() on every rank after changing the module. The step was dropped on all ranks; its gradients "
        "are forgotten, and the next step may run."
    ),
    "DetachedGradError": (
        "step 3: on rank 1 main_grad of 'a' is no longer the place in the gradient buffer, so what is added there"
        " is in no reduction. Something assigned or deleted it after wrapping. Write into main_grad in place "
        "(main_grad.copy_(), .add_()), and clear gradients with ddp.zero_grad(). The step was dropped on all "
        "ranks; its gradients are forgotten, and the next step may run."
    ),
    "PeerFailedError": (
        "step 3: rank 1 failed in forward: ValueError: boom. The step was dropped on all ranks; its gradients are"
        " forgotten, and the next step may run."
    ),
    "PeerLostError": (
        "rank 1 was last seen 31.5 s ago in forward (waiting for bucket 0). The process group cannot be used any "
        "more: gradients of this step are lost, parameters are those of the last step. End this process, or "
        "destroy the group, and start again from the last checkpoint with the ranks that are left."
    ),
    "WrapperBrokenError": (
        "step 3: rank 1 stopped in update, with the others about to go on: KeyboardInterrupt. The wrapper is broken on all "
        "ranks: nothing can be sent any more, and parameters may be of two different steps. On every rank call ddp.detach(), "
        "wrap the module again, make the optimizer anew and load the last checkpoint."
    ),
    "UpdateFailedError": "[rank 1] Muon has failed to update 'a' (ValueError: boom)",
    "ForkedProcessError": (
        "[rank 1] backward in a forked child process. The threads of the process group exist in the parent only, so this "
        "would wait for ever. Train in the process that wrapped the module; start helpers with the 'spawn' method, or let "
        "them work on a copy that was made before the fork (copy.deepcopy(ddp.module))."
    ),
    "GroupDestroyedError": (
        "[rank 1] backward, but the process group of the wrapper was destroyed, so nothing can be reduced any more and this "
        "replica would go on alone. Call ddp.detach() and wrap the module again over a living group; at the end of a program "
        "call ddp.detach() before destroy_process_group()."
    ),
    "PlainOptimizerError": (
        "[rank 1] AdamW.step() would update whole parameters ('a'), but use_distributed_optimizer=True reduce-scatters the "
        "gradients: this rank holds the reduced values of its own shard only, and the replicas would drift apart. Wrap the "
        "optimizer: megabucket.DistributedOptimizer(optimizer, ddp), one over all parameters of the wrapper, with groups in "
        "place of several optimizers; or set use_distributed_optimizer=False."
    ),
    "CollectiveError": "text",
    "CheckpointError": "text",
    "CheckpointNotSavedError": (
        "step 120: the checkpoint was not saved: rank 3: [Errno 28] No space left on device: run/file (rank 5 failed "
        "as well). Nothing was committed on any rank; the last good checkpoint is that of step 100. Training may go on; "
        "remove the cause and save again."
    ),
    "CheckpointInvalidError": (
        "run/step-00000120: manifest.json: it is empty. The file was damaged or changed after it was written, or is not a "
        "checkpoint of this library; nothing of it was loaded. steps 80, 100 can be tried: name one as the step to "
        "read."
    ),
    "CheckpointMissingError": "run: no checkpoint for step 120. It holds steps 80, 100: name one.",
    "CheckpointMismatchError": ("run/step-00000120 does not fit, and nothing was changed:\n  - a is missing\n  - b is unknown"),
    "CheckpointUnavailableError": (
        "[rank 0] state_dict() of the AdamW inside a DistributedOptimizer would find no state: it is in flat shards (1 of 2 on "
        "this rank). Call state_dict() of the DistributedOptimizer on every rank: it has whole parameters, in torch's format."
    ),
    "InvariantError": "text",
}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_the_text_of_the_class_is(error):
    assert str(error) == TEXTS[type(error).__name__]
