"""Bytes of live tensors: shared memory once, until it is freed, in every thread that counts."""

import threading

import torch

from recipes.benchmarks.live_bytes import LiveBytes
from recipes.benchmarks.memory_measured import ResizedBytes

KB = 1024
"""bytes of 256 numbers in fp32"""


def test_memory_counts_once_and_until_it_is_freed() -> None:
    live = LiveBytes()
    with live.counting():
        x = torch.zeros(256)
        views = [x.view(16, 16), x[:3], x.detach()]
        y = x + 1
        assert live.num_bytes == 2 * KB
        del x
        assert live.num_bytes == 2 * KB
        del views
        assert live.num_bytes == KB
    del y
    assert (live.num_bytes, live.peak) == (0, 2 * KB)


def test_backwards_count_and_tensors_of_before() -> None:
    live = LiveBytes()
    weight = torch.zeros(256, requires_grad=True)
    with live.counting():
        live.note([weight, weight.view(16, 16)])
        assert live.num_bytes == KB
        (weight * 2).sum().backward()
    assert weight.grad is not None and live.num_bytes == 2 * KB


def test_a_peak_begins_anew() -> None:
    live = LiveBytes()
    with live.counting():
        torch.zeros(1024)
        assert live.restart() == 4 * KB
        torch.zeros(512)
        assert live.peak == 2 * KB


def test_threads_and_resized_memory() -> None:
    live = LiveBytes()
    made = []

    def work() -> None:
        with live.counting():
            made.append(torch.zeros(256))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.zeros(256)  # not counted here
    assert live.num_bytes == KB
    with live.counting():
        made[0].resize_(512)
    assert live.num_bytes == 2 * KB


def test_one_device_counts() -> None:
    for device in ("cpu", "meta"):
        live = LiveBytes(device)
        with live.counting():
            x = torch.zeros(256, device="meta")
        assert live.num_bytes == KB * (device == "meta")
        del x


def test_memory_that_is_resized_outside_operations() -> None:
    live = ResizedBytes()
    with live.counting():
        first = torch.zeros(256)
        first.untyped_storage().resize_(0)
        second = torch.zeros(512)
        assert live.peak == 2 * KB
    del first, second
