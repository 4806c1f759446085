"""``MegabucketError``, and how names, ranks and values are listed in texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_NAMES_SHOWN: Final = 5
_VALUES_SHOWN: Final = 8


def name_list(names: Sequence[str]) -> str:
    """Return the first five names, quoted, and the count of the others.

    >>> name_list(["a", "b"])
    "'a', 'b'"
    >>> name_list([str(i) for i in range(7)])
    "'0', '1', '2', '3', '4' and 2 more"
    """
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    hidden = len(names) - _NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as words, the first five and the count of the others.

    >>> rank_list([1]), rank_list([0, 2]), rank_list(range(8))
    ('rank 1', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4 and 3 more')
    """
    shown = ", ".join(str(rank) for rank in ranks[:_NAMES_SHOWN])
    hidden = len(ranks) - _NAMES_SHOWN
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" + (f" and {hidden} more" if hidden > 0 else "")


def values_by_rank(values: Sequence[object]) -> str:
    """Return which ranks have which value, the rarest value last; of many values the most common ones.

    >>> values_by_rank([2, 1, 2])
    '2 on ranks 0, 2; 1 on rank 1'
    >>> values_by_rank(range(1024)).partition("; 7 ")[2]
    'on rank 7; others on ranks 8, 9, 10, 11, 12 and 1011 more'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(str(value), []).append(rank)
    most_first = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    texts = [f"{value} on {rank_list(ranks)}" for value, ranks in most_first[:_VALUES_SHOWN]]
    if hidden := [rank for _, ranks in most_first[_VALUES_SHOWN:] for rank in ranks]:
        texts.append(f"others on {rank_list(hidden)}")
    return "; ".join(texts)


def _rebuild(cls: type[MegabucketError], args: tuple[Any, ...], fields: dict[str, Any]) -> MegabucketError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class MegabucketError(Exception):
    """Base of all errors raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields: constructors take keywords only, which the default protocol cannot call."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    def to_dict(self) -> dict[str, Any]:
        """Return the class name, the text and the fields as plain data."""
        return {"error": type(self).__name__, "message": str(self), **self.__dict__}
