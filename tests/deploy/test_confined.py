"""The server where containers put it: a root that is read-only, another user, a small /dev/shm, a hardened unit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFINED = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=512m,mode=1777 tmpfs /tmp
case "$PYTHON_HOME" in /root/*)
  mkdir /tmp/python && mount --bind "$PYTHON_HOME" /tmp/python
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$PYTHON_HOME" && mount --bind /tmp/python "$PYTHON_HOME"
esac
mount --bind / / && mount -o remount,ro,bind /
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mkdir -m 777 /tmp/data
cd /
exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i \\
  PATH=/usr/bin:/bin HOME=/tmp/data PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PYTHONPATH" "$@"
"""


def can_confine() -> bool:
    """Return whether this user may make mount namespaces."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    probe = ["unshare", "--mount", "mount", "--make-rprivate", "/"]
    return subprocess.run(probe, capture_output=True, check=False, timeout=30).returncode == 0


@pytest.mark.more
@pytest.mark.skipif(not can_confine(), reason="needs root and mount namespaces")
def test_model_answers_in_a_read_only_root_as_another_user() -> None:
    program = "import sys; from quire.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "run", "What is the capital of France?", "--temperature", "0"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", CONFINED, "confined", *command],
        env={**os.environ, "PYTHON_HOME": sys.base_prefix, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "The capital of France is Paris.", done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_passes_systemd_analyze(tmp_path: Path) -> None:
    unit = (ROOT / "deploy/systemd/quire.service").read_text(encoding="utf-8")
    path = tmp_path / "quire.service"
    path.write_text(unit.replace("/opt/quire/bin/quire", "/bin/true"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "quire.service" in line]
    assert (done.returncode, complaints) == (0, [])
