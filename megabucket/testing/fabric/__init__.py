"""The emulated fabric: a process-group back-end that takes the time of an alpha-beta link. POSIX only."""

from megabucket.testing.fabric.group import EmulatedFabric, fabric_lateness
from megabucket.testing.fabric.work import Lateness

__all__ = ["EmulatedFabric", "Lateness", "fabric_lateness"]
