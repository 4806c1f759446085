"""The emulated fabric: a process-group back-end that takes the time of an alpha-beta link. POSIX only."""

from megabucket.testing.fabric.flight import Lateness
from megabucket.testing.fabric.settings import EmulatedFabric, fabric_lateness

__all__ = ["EmulatedFabric", "Lateness", "fabric_lateness"]
