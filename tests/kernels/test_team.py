# SPDX-License-Identifier: Apache-2.0
"""The team of threads: each index runs once, and no thread waits for one that has not started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import FLOAT, WeightScheme
from tests.fixtures.folded import folded
from tests.fixtures.threads import shuffle

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("restore_threads")

MUCH = 1 << 40
"""Work for which all threads are wanted."""


def share(count: int, body: Callable[[int, int], None], work: int = MUCH) -> None:
    """Python's lock lets one body run at a time; that is enough to see who takes what."""
    loaded = library.loaded()
    assert loaded is not None
    loaded.share(count, work, library.SHARED_BODY(lambda _, begin, end: body(begin, end)), None)


@given(st.integers(0, 3000), st.integers(1, 40), st.integers(0, 2**62))
def test_each_index_is_computed_once(count: int, threads: int, seed: int) -> None:
    set_num_threads(threads)
    shuffle(seed)
    seen = [0] * count

    def body(begin: int, end: int) -> None:
        for index in range(begin, end):
            seen[index] += 1

    share(count, body)
    assert seen == [1] * count


def test_small_work_is_one_range() -> None:
    set_num_threads(4)
    ranges: list[tuple[int, int]] = []
    share(100, lambda begin, end: ranges.append((begin, end)), work=1000)
    assert ranges == [(0, 100)]


def test_a_thread_that_is_put_aside_holds_up_only_its_piece() -> None:
    set_num_threads(2)
    own, taken, released = threading.get_ident(), {True: 0, False: 0}, threading.Event()

    def body(begin: int, end: int) -> None:
        leads = threading.get_ident() == own
        taken[leads] += end - begin
        if not leads:
            released.wait(60)
        elif taken[True] + taken[False] == 256:
            released.set()

    while not taken[False]:  # until the other thread came at all, before all was done
        taken.update({True: 0, False: 0})
        released.clear()
        share(256, lambda begin, end: (time.sleep(1e-4), body(begin, end))[1])
    assert taken[True] + taken[False] == 256
    assert taken[True] > 200


def test_in_a_body_loops_are_not_shared_again() -> None:
    set_num_threads(4)
    inner: list[tuple[int, int]] = []
    share(3, lambda *_: share(50, lambda begin, end: inner.append((begin, end))))
    assert set(inner) == {(0, 50)}


def test_threads_that_compute_at_once_take_turns() -> None:
    set_num_threads(3)
    weight = ops.pack_weight(torch.randn(512, 512), FLOAT)
    inputs = [torch.randn(64, 512) for _ in range(4)]
    expected = [ops.packed_linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def compute(index: int) -> None:
        for _ in range(30):
            if not torch.equal(ops.packed_linear(inputs[index], weight), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def products(scheme: WeightScheme, dtype: torch.dtype, rows: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weight = ops.pack_weight(torch.randn(1100, 512, generator=generator).to(dtype), scheme)
    x = torch.randn(rows, 512, generator=generator)
    return lambda: ops.packed_linear(x, weight)


@folded("rows", [1, 3, 16, 70, 400])
@folded(
    ("scheme", "dtype"),
    [
        (FLOAT, torch.bfloat16),
        (WeightScheme("int8"), torch.float32),
        (WeightScheme("int4", 32), torch.float32),
    ],
    ids=["bfloat16", "int8", "int4"],
)
def test_neither_threads_nor_the_order_of_pieces_changes_a_bit(
    scheme: WeightScheme, dtype: torch.dtype, rows: int
) -> None:
    compute = products(scheme, dtype, rows)
    set_num_threads(1)
    expected = compute()
    for threads in (2, 3, 8, 64):
        set_num_threads(threads)
        for seed in (0, 1, 2**40 + 5):
            shuffle(seed)
            assert torch.equal(compute(), expected), (threads, seed)


FORKS = """
import os, torch
from quire.kernels import ops
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import FLOAT
set_num_threads(3)
weight, x = ops.pack_weight(torch.randn(512, 512), FLOAT), torch.randn(64, 512)
expected = ops.packed_linear(x, weight)
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.packed_linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ops.packed_linear(x, weight), expected)
print("ok")
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_forked_process_has_a_team_of_its_own() -> None:
    result = run_python(FORKS)
    assert result.stdout == "ok\n", result.stderr


def test_signals_reach_the_processs_own_threads() -> None:
    """Handlers of Python run in the main thread, and a worker must not be interrupted in its stead."""
    set_num_threads(3)
    share(64, lambda *_: None)
    loaded_tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    blocked = {
        task: int(line.split()[1], 16)
        for task in loaded_tasks
        for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines()
        if line.startswith("SigBlk:")
    }
    workers = [task for task, mask in blocked.items() if mask >> (signal.SIGUSR1 - 1) & 1]
    assert len(workers) >= 2
    assert threading.main_thread().native_id not in workers


REFUSED = """
import os, resource, torch
from quire.kernels import ops
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.linear import FLOAT
weight, x = ops.pack_weight(torch.randn(512, 512), FLOAT), torch.randn(64, 512)
expected, before = ops.packed_linear(x, weight), len(os.listdir("/proc/self/task"))
(size,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + 2**26, -1))
torch.set_num_threads = lambda count: None
set_num_threads(300)
same = torch.equal(ops.packed_linear(x, weight), expected)
print(same, 0 < len(os.listdir("/proc/self/task")) - before < 200)
"""


@pytest.mark.more
def test_threads_that_the_system_refuses_are_done_without() -> None:
    """The address space has room for the stacks of a few."""
    result = run_python(REFUSED)
    assert result.stdout == "True True\n", result.stderr


def test_thread_count_of_a_kernel_is_bounded() -> None:
    loaded = library.loaded()
    assert loaded is not None
    assert [loaded.set_threads(count) for count in (-3, 0, 1, 7, 2**40)] == [1, 1, 1, 7, 512]
