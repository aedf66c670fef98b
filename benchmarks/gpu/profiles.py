# SPDX-License-Identifier: Apache-2.0
"""Profile of a step: the device's most expensive kernels, and how long it waits for the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.rows import Row
from benchmarks.gpu.target import Target

NUM_KERNELS = 20
NAME_LENGTH = 60


def profile_rows(target: Target, what: str, run: Callable[[int], None], num_steps: int) -> Iterator[Row]:
    """`run` takes so many steps. Per step: what the dearest kernels take, and what the device is idle.

    The time of a step is measured without the profiler, which slows the host down.
    """
    run(1)
    target.synchronize()
    started = time.perf_counter()
    run(num_steps)
    target.synchronize()
    step_us = 1e6 * (time.perf_counter() - started) / num_steps
    activity = ProfilerActivity.CUDA if target.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        run(num_steps)
        target.synchronize()
    kernels = [
        (_own_us(event) / num_steps, event) for event in recorded.key_averages() if _is_kernel(target, event)
    ]
    busy_us = sum(own_us for own_us, _ in kernels)
    yield Row(f"{what}: a step", "us", step_us)
    yield Row(f"{what}: the device is idle", "%", 100 * max(1 - busy_us / step_us, 0.0))
    for own_us, event in sorted(kernels, key=lambda kernel: -kernel[0])[:NUM_KERNELS]:
        yield Row(f"{what}: {event.count / num_steps:g} x {event.key[:NAME_LENGTH]}", "us", own_us)


def _is_kernel(target: Target, event: Any) -> bool:
    return bool(event.device_type == (DeviceType.CUDA if target.device.type == "cuda" else DeviceType.CPU))


def _own_us(event: Any) -> float:
    on_device = event.device_type == DeviceType.CUDA
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total)
