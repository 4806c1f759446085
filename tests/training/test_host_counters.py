import torch

from megabucket.training.host import PeakMemory, loopback_bytes


def test_the_peak_of_the_process_rises_with_memory_that_is_written():
    peak = PeakMemory.from_now(torch.device("cpu"))

    held = torch.ones(400_000_000, dtype=torch.uint8)  # more than a test process has touched before

    assert peak.growth_bytes() > 100_000_000
    del held
    assert peak.growth_bytes() > 100_000_000  # a peak stays


def test_the_loopback_counter_is_a_number_where_there_is_one(tmp_path):
    counter = tmp_path / "tx_bytes"
    counter.write_text("12345\n")

    assert loopback_bytes(counter) == 12345
    assert loopback_bytes(tmp_path / "missing") is None


def test_a_counter_that_holds_no_number_is_not_used(tmp_path):
    counter = tmp_path / "tx_bytes"
    counter.write_text("n/a\n")

    assert loopback_bytes(counter) is None
