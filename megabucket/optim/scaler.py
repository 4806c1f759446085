"""Loss scalers for frameworks that have none: a constant scale, and Megatron's dynamic one.

They have the methods of ``torch.amp.GradScaler``, which ``DistributedOptimizer`` supports as well: ``scale(loss).backward()``,
``unscale_(optimizer)`` before gradients are read or clipped, ``step(optimizer)``, ``update()``. Unlike torch's, the dynamic one
tolerates a few infinite gradients before it lowers the scale, and has a minimum.

Numbers are rounded to float32 as in Megatron, so sequences of scales are equal to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megabucket.errors import ConfigError, PhaseError, refuse_copies
from megabucket.optim.distributed_optimizer import DistributedOptimizer, StepResult


class ConstantGradScaler:
    """Multiply losses by a constant, and skip steps whose gradients are infinite.

    Raises:
        ConfigError: the scale is not a finite number > 0.
    """

    __reduce_ex__ = refuse_copies(
        "a {} cannot be copied or pickled: it remembers which optimizers have tested their gradients in this step. Make a new "
        "one with the same arguments, and load_state_dict(scaler.state_dict()) into it."
    )

    def __init__(self, initial_scale: float) -> None:
        _check(0 < initial_scale < math.inf, f"initial_scale must be a finite number > 0, got {initial_scale!r}")
        self._scale = _float32(initial_scale)
        self._found_inf: dict[int, bool] = {}  # of the last step since the last update, by id of the optimizer

    def get_scale(self) -> float:
        """Return the current scale."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale. The optimizer checks that all ranks have the same scale."""
        return loss * self._scale

    def unscale_(self, optimizer: DistributedOptimizer) -> None:
        """Finish the gradient sync and divide the gradients by the scale. Optional, at most once per step: ``step`` does it.

        Raises:
            PhaseError: the gradients were divided already.
            MegabucketError: as ``DistributedOptimizer.unscale_grads``.
        """
        self._found_inf[id(optimizer)] = optimizer.unscale_grads(_float32(1 / self._scale))

    def step(self, optimizer: DistributedOptimizer) -> StepResult | None:
        """Step unless a gradient of any rank is infinite or nan, and return the result.

        Raises:
            MegabucketError: as ``DistributedOptimizer.step``.
        """
        if not optimizer.is_unscaled:  # the result of a dropped step does not hold for this one
            self.unscale_(optimizer)
        return optimizer.last_step if self._found_inf[id(optimizer)] else optimizer.step()

    def update(self) -> None:
        """Choose the next scale, after the steps of all optimizers whose losses had this one.

        Raises:
            PhaseError: no gradients were tested since the last call.
        """
        if not self._found_inf:
            raise PhaseError(
                "update() was called before any gradients were tested: call step(optimizer) or unscale_(optimizer)."
            )
        self._follow(found_inf=any(self._found_inf.values()))
        self._found_inf.clear()

    def _follow(self, *, found_inf: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state: nothing changes."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the caller gives the scale."""


class DynamicGradScaler(ConstantGradScaler):
    """Megatron's dynamic loss scale.

    ``growth_interval`` good steps in a row raise the scale. ``hysteresis`` bad steps since it was last raised lower it, and so
    does each further one.

    >>> scaler = DynamicGradScaler(1024, growth_interval=3)
    >>> def scale_after(step):
    ...     scaler._follow(found_inf=step == "bad")
    ...     return int(scaler.get_scale())
    >>> [scale_after(step) for step in ("bad", "bad", "bad", "good", "good", "good", "bad", "bad")]
    [1024, 512, 256, 256, 256, 512, 512, 256]

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        *,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        super().__init__(initial_scale)
        _check(0 < min_scale <= initial_scale, f"min_scale must be > 0 and <= initial_scale, got {min_scale!r}")
        _check(1 < growth_factor < math.inf, f"growth_factor must be a finite number > 1, got {growth_factor!r}")
        _check(0 < backoff_factor < 1, f"backoff_factor must be between 0 and 1, got {backoff_factor!r}")
        _check(growth_interval > 0, f"growth_interval must be > 0, got {growth_interval!r}")
        _check(hysteresis > 0, f"hysteresis must be > 0, got {hysteresis!r}")
        self._min_scale, self._growth_factor = _float32(min_scale), _float32(growth_factor)
        self._backoff_factor = _float32(backoff_factor)
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._num_good, self._num_bad_left = 0, hysteresis  # good steps in a row; bad ones until the scale is lowered

    def _follow(self, *, found_inf: bool) -> None:
        if found_inf:
            self._num_good = 0
            self._num_bad_left -= 1
            if self._num_bad_left <= 0:
                self._scale = max(_float32(self._scale * self._backoff_factor), self._min_scale)
            return
        self._num_good += 1
        if self._num_good == self._growth_interval:
            self._num_good, self._num_bad_left = 0, self._hysteresis
            self._scale = _float32(self._scale * self._growth_factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counts, under Megatron's names."""
        return {"scale": self._scale, "growth_tracker": self._num_good, "hysteresis_tracker": self._num_bad_left}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of this class or of Megatron's."""
        self._scale = float(state_dict["scale"])
        self._num_good, self._num_bad_left = int(state_dict["growth_tracker"]), int(state_dict["hysteresis_tracker"])


def _float32(number: float) -> float:
    """Round to float32."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def _check(is_right: bool, text: str) -> None:
    if not is_right:
        raise ConfigError(text)
