"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("megabucket", "torch", "numpy", "megatron-core", "deepspeed")


def facts() -> dict[str, Any]:
    """Return plain data about this machine and this environment."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()},
        "commit": commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": round(os.getloadavg()[0], 2),
        },
    }


def version_of(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str | None:
    """Return what git calls this state, with ``-dirty`` where files differ; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
