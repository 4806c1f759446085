"""``optimizer.state`` by parameter, over state that lies in flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import optim

from megabucket.errors import refuse_copies

MAIN_PARAM: Final = "main_param"
"""The key of the float32 values of a 16-bit parameter, beside those of the optimizer."""

NUMBERS_OF: Final[Mapping[type[torch.optim.Optimizer], frozenset[str]]] = MappingProxyType(
    {
        **dict.fromkeys((optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW), frozenset({"step"})),
        **dict.fromkeys((optim.Adamax, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SparseAdam), frozenset({"step"})),
        optim.NAdam: frozenset({"step", "mu_product"}),
        optim.ASGD: frozenset({"step", "mu", "eta"}),
    }
)
"""Keys of the state of torch's own optimizers with one number for a whole parameter, which has no step without them."""

KNOWN_NUMBERS: Final = frozenset[str]().union(*NUMBERS_OF.values())
"""All of them. For a scalar parameter the shape of a value does not show whether it is one per element."""


def is_per_element(key: str, value: Any, like: torch.Tensor) -> bool:
    """Return whether an entry holds one value per element of a parameter or shard, and not one number for all."""
    return isinstance(value, torch.Tensor) and value.shape == like.shape and key not in KNOWN_NUMBERS


class FlatState(Protocol):
    """The state behind the mapping."""

    @property
    def loose_keys(self) -> Iterator[Any]:
        """The keys of state that is in no shard."""

    def loose_of(self, key: Any) -> MutableMapping[Any, Any]:
        """Return the mapping for state that is in no shard, under a key: of frozen parameters, and of no parameter."""

    @property
    def flat_params(self) -> Mapping[torch.nn.Parameter, str]:
        """The parameters whose state is in flat tensors."""

    def has_state(self, param: torch.nn.Parameter) -> bool:
        """Return whether a step or a load has made state for a parameter."""

    def read(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return this rank's state of a parameter: views of flat tensors, and copies of numbers."""

    def write(self, changed: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """Replace the state of parameters."""


class ParamState(MutableMapping[Any, Any]):
    """The state of a ``DistributedOptimizer``, by parameter, as in ``torch.optim.Optimizer.state``.

    Values per element are views: of the parameter's shape where this rank has all of it, otherwise of its part, 1D in memory
    order. Of a parameter of which this rank has nothing they are empty, and numbers are those of another one of its group.

    What the caller changes in the dict of a parameter counts from the next step or call of the optimizer on, which also ends
    the use of that dict.
    """

    __reduce_ex__ = refuse_copies(
        "a {} cannot be copied or pickled: it is a view of flat shards. state_dict() of the DistributedOptimizer, called on "
        "every rank, returns the state whole."
    )

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self.shown: dict[torch.nn.Parameter, dict[str, Any]] = {}
        """State that was handed out since the last ``fold``, and perhaps changed by the caller."""
        self._read: dict[torch.nn.Parameter, dict[str, Any]] = {}  # as they were then

    def __getitem__(self, key: Any) -> Any:
        if key not in self._flat.flat_params:
            return self._flat.loose_of(key)[key]
        if key not in self.shown:
            found = self._flat.read(key)
            self.shown[key], self._read[key] = found, dict(found)
        return self.shown[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        (self.shown if key in self._flat.flat_params else self._flat.loose_of(key))[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self._flat.flat_params:
            self.shown[key] = {name: value for name, value in self[key].items() if name == MAIN_PARAM}  # not the optimizer's
        else:
            del self._flat.loose_of(key)[key]

    def __contains__(self, key: Any) -> bool:
        if key not in self._flat.flat_params:
            return key in self._flat.loose_of(key)
        return bool(self.shown[key].keys() - {MAIN_PARAM}) if key in self.shown else self._flat.has_state(key)

    # A mapping with default values: Python's own methods would find an empty dict under every key.

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter that has some."""
        return self[key] if key in self else default  # noqa: SIM401 - this is ``get``

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, which becomes ``default`` if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of a parameter and return it.

        Raises:
            KeyError: there is none, and no default.
        """
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        """Remove all state: the next step begins anew."""
        for key in list(self):
            del self[key]

    def __iter__(self) -> Iterator[Any]:
        yield from filter(self.__contains__, self._flat.flat_params)
        yield from self._flat.loose_keys

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self})

    def fold(self) -> None:
        """Bring changes of the caller into the flat tensors.

        Raises:
            OptimizerParametersError: a value fits neither the parameter nor this rank's part of it.
        """
        shown, self.shown = self.shown, {}
        read, self._read = self._read, {}
        changed = {param: dict(values) for param, values in shown.items() if self._differs(param, values, read.get(param))}
        if changed:
            self._flat.write(changed)

    def _differs(self, param: torch.nn.Parameter, values: Mapping[str, Any], read: Mapping[str, Any] | None) -> bool:
        if read is None or values.keys() != read.keys() or any(values[key] is not read[key] for key in read):
            return True
        # Numbers are copies, which may have been written to in place.
        now = self._flat.read(param)
        numbers = {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and value.numel() == 1}
        return any(not torch.equal(value, now[key]) for key, value in numbers.items())
