# SPDX-License-Identifier: Apache-2.0
"""The CPU image's steps as shell: an environment is trimmed, and copied to a root with what it loads of the system.

There it serves as another user; the root is read-only, /dev/shm small.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.test_confined import can_confine

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
MOST_BYTES = 600e6
CONFINED = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"
mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev" && mount -t tmpfs -o size=64m,mode=1777 tmpfs "$1/dev/shm"
for place in data tmp/own; do mount -t tmpfs -o size=256m,mode=1777 tmpfs "$1/$place"; done
root=$1; shift
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/data TMPDIR=/tmp/own PYTHONDONTWRITEBYTECODE=1 \\
  chroot --userspec=65534:65534 "$root" "$@"
"""
PROGRAM = """
import threading, urllib.request
from quire import LLM, SamplingParams
llm = LLM(cpu_threads=1, kv_cache_memory_bytes=2**25, quantization="int4", num_scheduler_steps=4)
params = SamplingParams(temperature=0.0, max_tokens=3)
print(llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text)
llm.shutdown()

import json, signal, subprocess, sys, time
serve = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--port", "8973", "--cpu-threads", "1"]
server = subprocess.Popen([*serve, "--kv-cache-memory-bytes", "32M"])
url, until = "http://127.0.0.1:8973", time.monotonic() + 1200
def answer(path, body=None):
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=1200).read()
while True:
    try:
        answer("/readyz")
        break
    except OSError:
        assert server.poll() is None and time.monotonic() < until, "the server is not ready"
        time.sleep(0.1)
body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
print(json.loads(answer("/v1/completions", body))["choices"][0]["text"])
server.send_signal(signal.SIGTERM)
print("exit code", server.wait(1200))
"""


def needed() -> Iterator[metadata.Distribution]:
    """The package and, once each, what it needs without extras."""
    todo, seen = ["quire-llm"], set[str]()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name not in seen:
            seen.add(name)
            found = metadata.distribution(name)
            wanted = map(Requirement, found.requires or ())
            todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
            yield found


def environment(folder: Path) -> Path:
    """An environment with copies of the installed packages, quire from the source tree."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    shutil.copytree(ROOT / "quire", packages / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    for distribution in needed():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, packages / file)
                shutil.copymode(source, packages / file)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.base_prefix) / "bin" / version)
    (folder / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    return folder


@pytest.mark.more
@pytest.mark.skipif(not can_confine(), reason="needs root and mount namespaces")
@pytest.mark.skipif(shutil.which("strip") is None, reason="needs strip, which the image's steps have")
def test_image_is_small_and_serves(tmp_path: Path) -> None:
    text = (DOCKER / "Dockerfile.cpu").read_text(encoding="utf-8")
    (unwanted,) = re.findall(r"trim\.sh /opt/quire (.+)", text)
    place, root = environment(tmp_path / "quire"), tmp_path / "root"
    root.mkdir()
    subprocess.run(["sh", DOCKER / "trim.sh", place, *unwanted.split()], check=True, timeout=1500)
    subprocess.run(["sh", DOCKER / "root.sh", place, root], check=True, timeout=1500)
    shutil.rmtree(place)
    assert sum(path.lstat().st_size for path in root.rglob("*")) < MOST_BYTES

    (root / "tmp/own").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", CONFINED, "sh", root, place / "bin/python", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = done.stdout.split("\n")
    assert (lines[0], lines[-3], lines[-2]) == (" Paris.", " Paris.", "exit code 0"), done.stderr
