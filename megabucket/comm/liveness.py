"""How the ranks of a process group watch each other: the settings, in order with the group, and the warning about slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from megabucket.config.ddp import DistributedDataParallelConfig
from megabucket.errors import ConfigError, rank_list

_RANKS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a rank counts as lost and when as slow.

    Attributes:
        heartbeat_s: how often each rank writes a sign of life into the store of its group; ``None``: never, so that only dead
            and stopped processes of the same host are noticed.
        dead_after_s: a rank without a sign of life for this long is lost.
        straggler_warning_s: how long a rank waits for living ones before it warns; ``None``: for ever.
        is_default: nobody chose ``dead_after_s``, so it gives way to a group whose time limit is short.
    """

    heartbeat_s: float | None = 1.0
    dead_after_s: float = 30.0
    straggler_warning_s: float | None = 30.0
    is_default: bool = False

    @staticmethod
    def from_config(config: DistributedDataParallelConfig) -> Liveness:
        """Return the settings of a wrapper's config."""
        return Liveness(
            heartbeat_s=config.heartbeat_s,
            dead_after_s=config.dead_after_s,
            straggler_warning_s=config.straggler_warning_s,
            is_default="dead_after_s" not in config.model_fields_set,
        )

    def fitted_to(self, group_timeout_s: float | None) -> Liveness:
        """Return settings that are in order with the time limit of the group (``None``: unknown, and not looked at).

        Raises:
            ConfigError: a rank would be called dead between two beats, or only after the group has given up.

        >>> Liveness(is_default=True).fitted_to(10.0).dead_after_s
        5.0
        """
        fitted = self
        if self.is_default and group_timeout_s is not None and self.dead_after_s > group_timeout_s / 2:
            dead_after_s = group_timeout_s / 2
            heartbeat_s = None if self.heartbeat_s is None else min(self.heartbeat_s, dead_after_s / 4)
            fitted = replace(self, dead_after_s=dead_after_s, heartbeat_s=heartbeat_s)
        if fitted.heartbeat_s is not None and fitted.dead_after_s <= 2 * fitted.heartbeat_s:
            raise ConfigError(
                f"dead_after_s={fitted.dead_after_s:g} must be more than twice heartbeat_s={fitted.heartbeat_s:g}: a rank "
                "whose last sign of life is one beat old is not dead"
            )
        if group_timeout_s is not None and fitted.dead_after_s >= group_timeout_s:
            raise ConfigError(
                f"dead_after_s={fitted.dead_after_s:g} must be less than the time limit of the process group, which is "
                f"{group_timeout_s:g} s: otherwise the group gives up first, and nothing can say which rank froze. Lower "
                "dead_after_s, or pass a longer timeout= to init_process_group() or new_group()"
            )
        return fitted


class StragglerWarning(UserWarning):
    """A rank has waited long for others that are alive."""

    def __init__(self, *, rank: int, waited_s: float, waiting_for: str, ranks: Sequence[int], states: Sequence[str]) -> None:
        self.rank, self.waited_s, self.waiting_for = rank, waited_s, waiting_for
        self.ranks, self.states = tuple(ranks), tuple(states)
        late = list(zip(self.ranks, self.states, strict=True))
        findings = "; ".join(f"rank {late_rank} {state}" for late_rank, state in late[:_RANKS_SHOWN])
        super().__init__(
            f"[rank {rank}] has waited {waited_s:.3g} s for {waiting_for}. "
            + (
                f"{findings}. All ranks wait for {rank_list(self.ranks)}, slow or stuck."
                if findings
                else "No rank is known to be late: the transfer itself may be slow, or heartbeats are off (heartbeat_s=None)."
            )
            + " Look at its log or at its stack (py-spy dump). The wait goes on."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by fields: the constructor takes keywords only, which the default protocol cannot call."""
        return _warning_of, (dict(self.__dict__),)


def _warning_of(fields: dict[str, Any]) -> StragglerWarning:
    return StragglerWarning(**fields)
