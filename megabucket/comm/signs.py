"""What ranks tell each other through the store of their group: signs of life, and the finding that a rank is lost.

Plain data with a JSON form. What cannot be read counts as not written: a store may be shared with others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from types import MappingProxyType
from typing import Any, Final

from megabucket.comm.peers import ProcessIdentity
from megabucket.errors import PeerLostError


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life of a rank."""

    process: ProcessIdentity
    count: int
    every_s: float | None  # None: this one is all there will be
    step: int
    phase: str
    bucket: int  # -1: in none
    num_launched: int
    at_s: float  # time.time() of the writer
    has_left: bool  # the last one: its program ended in good order, or its wrapper was detached

    @property
    def place(self) -> str:
        """Where the rank was in its work."""
        return f"{self.phase}, step {self.step}" + (f", bucket {self.bucket}" if self.bucket >= 0 else "")

    def encode(self) -> str:
        """Return the JSON form: a list, because a file store keeps every beat."""
        return json.dumps(astuple(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rank has found out about lost ranks: the fields of the error that all ranks raise."""

    ranks: tuple[int, ...]
    states: tuple[str, ...]
    during: str
    recorder: str = ""

    def encode(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))

    def error(self) -> PeerLostError:
        """Return a fresh error: one that is raised twice would carry both tracebacks."""
        return PeerLostError(ranks=self.ranks, states=self.states, during=self.during, recorder=self.recorder)


@dataclass(frozen=True, slots=True)
class View:
    """What the store said at one moment."""

    asked_at_s: float  # time.monotonic() before the store was asked for ``beats``
    beats: Mapping[int, Beat]
    finding: Finding | None


NO_VIEW: Final = View(0.0, MappingProxyType({}), None)


def decode_beat(raw: bytes) -> Beat | None:
    """Return the sign of life in a value of the store, or ``None`` when there is none."""
    try:
        process, *fields = json.loads(raw)
        return Beat(ProcessIdentity(*process), *fields)
    except (ValueError, TypeError):
        return None


def decode_finding(raw: bytes) -> Finding | None:
    """Return the finding in a value of the store, or ``None`` when there is none."""
    try:
        fields: dict[str, Any] = json.loads(raw)
        finding = Finding(tuple(fields["ranks"]), tuple(fields["states"]), str(fields["during"]), str(fields["recorder"]))
    except (ValueError, TypeError, KeyError):
        return None
    return finding if len(finding.ranks) == len(finding.states) else None
