import subprocess
import sys
from pathlib import Path

from peers.host import loopback_bytes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# In a process of its own: an earlier test may have reached a peak that hides any growth.
GROW = """
import torch
from peers.host import PeakMemory

peak = PeakMemory.from_now(torch.device("cpu"))
held = torch.ones(200_000_000, dtype=torch.uint8)
grown = peak.growth_bytes()
del held
print(peak.source, grown, peak.growth_bytes(), sep=",")
"""


def test_the_peak_of_the_process_rises_with_memory_that_is_written_and_stays():
    out = subprocess.run(
        [sys.executable, "-c", GROW], cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=60
    ).stdout

    source, grown, after_release = out.strip().split(",")
    assert source == "resident set"
    assert 190_000_000 < int(grown) < 260_000_000
    assert int(after_release) > 190_000_000


def test_the_loopback_counter_is_a_number_where_there_is_one(tmp_path):
    counter = tmp_path / "tx_bytes"
    counter.write_text("12345\n")

    assert loopback_bytes(counter) == 12345
    assert loopback_bytes(tmp_path / "missing") is None


def test_a_counter_that_holds_no_number_is_not_used(tmp_path):
    counter = tmp_path / "tx_bytes"
    counter.write_text("n/a\n")

    assert loopback_bytes(counter) is None
