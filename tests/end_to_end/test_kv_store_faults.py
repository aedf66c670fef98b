# SPDX-License-Identifier: Apache-2.0
"""Whole engines on a directory that is damaged, stale, full, failing or left by a kill: the tokens are right."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.kv_store import tier
from quire.kv_store.disk import writer
from tests.end_to_end import test_kv_store_conversations as conversations
from tests.end_to_end.test_kv_store_conversations import KINDS, OPTIONS, answers_of, engine, script

patient = conversations.patient
NUM_CONVERSATIONS = 16
READ, WRITE = os.preadv, os.pwritev

KILLED = """
import json, sys
from quire import LLM, SamplingParams
model, store, prompts, options = sys.argv[1:]
params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
llm = LLM(model, kv_store=store, **json.loads(options))
for prompt in json.loads(prompts):
    llm.generate([{"prompt_token_ids": prompt}], params)
    print("one more", flush=True)
"""


class Disk:
    """Faults of the disk under all stores of this process, and of the files of one of them.

    Attributes:
        write_error: writes to new places fail with this error; 0: none.
        fails: reads fail.
    """

    def __init__(self, directory: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.write_error, self.fails = 0, False
        self._draw = random.Random(seed)
        self._kept: dict[Path, bytes] = {}
        self._num_copies = 0
        monkeypatch.setattr(os, "preadv", self._preadv)
        monkeypatch.setattr(os, "pwritev", self._pwritev)

    def damage(self) -> str:
        """Do something to the disk; returns its name."""
        faults = (
            "flip",
            "cut",
            "keep",
            "stale",
            "gone",
            "full",
            "read-only",
            "broken",
            "short",
            "well",
            "well",
        )
        chosen = self._draw.choice(faults)
        self.write_error = {"full": errno.ENOSPC, "read-only": errno.EROFS}.get(chosen, 0)
        self.fails = chosen == "broken"
        files = sorted(self.directory.glob("*/*.rows"))
        if files and chosen in ("flip", "cut", "keep", "stale", "gone", "short"):
            getattr(self, f"_{chosen}")(self._draw.choice(files))
        return chosen

    def snapshot(self) -> None:
        """Continue on a copy of the files as they are, as after a kill: nothing was closed, and no lock is held."""
        self._num_copies += 1
        copy = self.directory.with_name(f"copy {self._num_copies}")
        copy.mkdir(mode=0o700)
        self._kept.clear()
        for file in self.directory.glob("*/*"):
            (copy / file.parent.name).mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the engine has just renamed it
                shutil.copy2(file, copy / file.parent.name / file.name)
        self.directory = copy

    def _flip(self, file: Path) -> None:
        with file.open("r+b") as opened:
            for _ in range(40):
                at = self._draw.randrange(max(file.stat().st_size, 1))
                opened.seek(at)
                byte = opened.read(1)
                opened.seek(at)
                opened.write(bytes([(byte or b"\0")[0] ^ 1 << self._draw.randrange(8)]))

    def _cut(self, file: Path) -> None:
        os.truncate(file, self._draw.randrange(file.stat().st_size + 1))

    def _short(self, file: Path) -> None:
        os.truncate(file, max(file.stat().st_size - 100, 0))

    def _keep(self, file: Path) -> None:
        self._kept[file] = file.read_bytes()

    def _stale(self, file: Path) -> None:
        for kept, content in self._kept.items():
            with contextlib.suppress(FileNotFoundError):
                kept.write_bytes(content)

    def _gone(self, file: Path) -> None:
        file.unlink()

    def _preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return READ(fd, buffers, at)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return WRITE(fd, buffers, at)


def run(kind: str, seed: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Replay conversations, with a fault and maybe a restart or a kill behind each round; returns the stored tokens.

    Behind the first round the engine is started again without a fault, so some tokens of the second are stored ones.
    """
    monkeypatch.setattr(tier, "REST_S", 0.0)
    monkeypatch.setattr(tier, "MOST_REST_S", 0.0)
    monkeypatch.setattr(writer, "WRITE_AGAIN_S", 0.0)
    rounds, num_stored, done = script(model, kind, NUM_CONVERSATIONS), 0, []
    disk, draw = Disk(folder / "rows", seed, monkeypatch), random.Random(seed)
    sizes = itertools.chain([0.01, 0.01], (draw.choice([0.0005, 0.01]) for _ in itertools.count()))
    with contextlib.ExitStack() as running:

        def start() -> Any:
            options = {"kv_store": str(disk.directory), "kv_store_gb": next(sizes)}
            return running.enter_context(engine(model, KINDS[kind][1] | options))

        llm = start()
        for one in rounds:
            answers, number = answers_of(llm, one.turns)
            assert answers == one.answers, f"after {done}"
            num_stored += number
            done.append(disk.damage() if done else "well")
            event = draw.choice(["restart", "kill", "go on", "go on"]) if done[1:] else "restart"
            if event == "kill":
                disk.snapshot()
            if event != "go on":
                disk.write_error, disk.fails = 0, False
                running.close()
                llm = start()
    return num_stored


@pytest.mark.parametrize(("kind", "seed"), [("full", 3), ("state", 4)])
def test_a_damaged_directory_changes_no_token(
    kind: str, seed: int, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(kind, seed, tiny_model(KINDS[kind][0]), tmp_path, monkeypatch) > 0


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_damaged_often_changes_no_token(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(100, 106):
        (tmp_path / str(seed)).mkdir()
        run(kind, seed, tiny_model(KINDS[kind][0]), tmp_path / str(seed), monkeypatch)


def test_engines_that_take_rows_from_each_other_are_right(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of other rows in a directory that has room for few: both save, and neither serves what is gone."""
    monkeypatch.setattr(writer, "GROW_AGAIN_S", 0.0)
    kinds, gib = ("full", "int8"), 0.0005
    model, rows = tiny_model(KINDS["full"][0]), tmp_path / "rows"
    with contextlib.ExitStack() as running:
        options = [KINDS[kind][1] | {"kv_store": str(rows), "kv_store_gb": gib} for kind in kinds]
        first, second = (running.enter_context(engine(model, one)) for one in options)
        for mine, other in zip(*(script(model, kind, NUM_CONVERSATIONS) for kind in kinds), strict=False):
            for llm, one in ((first, mine), (second, other)):
                assert answers_of(llm, one.turns)[0] == one.answers
                llm.llm_engine.call_core("reset_prefix_cache")  # which saves what is to be saved
                sizes = [sum(file.stat().st_size for file in part.glob("*.rows")) for part in rows.iterdir()]
                assert sum(sizes) <= gib * 2**30
    assert min(sizes) > gib * 2**30 / 4, sizes


@pytest.mark.more
def test_an_engine_killed_while_it_writes_serves_right_tokens(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each time after another number of answers, while blocks of them are written on a thread."""
    model, directory = tiny_model(KINDS["full"][0]), tmp_path / "rows"
    rounds = script(model, "full", NUM_CONVERSATIONS)
    prompts = [turn.prompt for one in rounds for turn in one.turns]
    draw = random.Random(8)
    for _ in range(4):
        command = [
            sys.executable,
            "-c",
            KILLED,
            str(model),
            str(directory),
            json.dumps(prompts),
            json.dumps(OPTIONS),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
            assert child.stdout is not None
            for _ in range(draw.randrange(1, len(prompts))):
                while b"one more" not in child.stdout.readline():
                    assert child.poll() is None
            child.send_signal(signal.SIGKILL)
        draw.shuffle(prompts)
    with engine(model, {"kv_store": str(directory)}) as llm:
        got = [answers_of(llm, one.turns) for one in rounds]
    assert [answers for answers, _ in got] == [one.answers for one in rounds]
    assert sum(number for _, number in got) > 0
