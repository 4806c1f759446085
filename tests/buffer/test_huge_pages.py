"""Large buffers ask the kernel for huge pages, and are full of what they should be, whatever it answers."""

from pathlib import Path

import pytest
import torch

from megabucket.buffer import huge_pages
from megabucket.buffer.huge_pages import LEAST_BYTES, filled

CPU = torch.device("cpu")


def flags_of_mapping(address):
    """What the kernel was told about the memory at an address."""
    holds_address = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(place, 16) for place in words[0].split("-"))
            holds_address = start <= address < stop
        elif holds_address and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_the_memory_of_a_large_buffer_is_marked_from_its_first_page_to_its_last():
    tensor = filled(LEAST_BYTES, 1.0, dtype=torch.float32, device=CPU)

    for address in (tensor.data_ptr() + 4096, tensor.data_ptr() + tensor.nbytes // 2, tensor.data_ptr() + tensor.nbytes - 8192):
        assert "hg" in flags_of_mapping(address)


@pytest.mark.parametrize("numel", [0, 1, 1000, LEAST_BYTES // 4 - 1, LEAST_BYTES // 4, LEAST_BYTES // 4 + 1])
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_every_element_has_the_value_and_its_sign(numel, value):
    tensor = filled(numel, value, dtype=torch.float32, device=CPU)

    assert (tensor.shape, tensor.dtype) == ((numel,), torch.float32)
    assert torch.equal(tensor.view(torch.int32), torch.full((numel,), value).view(torch.int32))


@pytest.mark.parametrize(
    ("numel", "dtype", "device", "asks"),
    [
        (LEAST_BYTES // 4 - 1, torch.float32, "cpu", False),
        (LEAST_BYTES // 4, torch.float32, "cpu", True),
        (LEAST_BYTES // 4, torch.bfloat16, "cpu", False),
        (LEAST_BYTES, torch.float32, "meta", False),
    ],
)
def test_only_large_buffers_of_the_host_ask(numel, dtype, device, asks, monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_ask_for_huge_pages", lambda *place: asked.append(place))

    tensor = filled(numel, 0.0, dtype=dtype, device=torch.device(device))

    assert asked == ([(tensor.data_ptr(), tensor.nbytes)] if asks else [])


def test_a_system_that_knows_no_huge_pages_gives_memory_all_the_same(monkeypatch):
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)

    assert filled(LEAST_BYTES, 2.0, dtype=torch.uint8, device=CPU).sum() == 2 * LEAST_BYTES
