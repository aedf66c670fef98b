# SPDX-License-Identifier: Apache-2.0
"""Tests of `tools/release.py` in repositories of their own, and of the packages that it makes."""

from __future__ import annotations

import datetime
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TODAY = datetime.date(2030, 1, 2)
PYPROJECT = '[project]\nname = "x"\nversion = "0.2.0"  # a comment\n'
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- A feature.\n\n## 0.1.0 (2029-01-01)\n\n- The first.\n"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _tool("release")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose last release is 0.1.0."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@example.com")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    git(tmp_path, "tag", "v0.1.0")
    return tmp_path


def nothing(_: Path) -> None:
    """Accept any tree."""


def refuse(_: Path) -> None:
    raise tool.RefusedError("the wheel does not answer")


def test_release_of_a_clean_tree_stamps_commits_and_tags(root: Path) -> None:
    assert tool.release(root, "0.3.0", TODAY, nothing) == "v0.3.0"
    assert (root / "pyproject.toml").read_text() == PYPROJECT.replace("0.2.0", "0.3.0")
    changelog = (root / "CHANGELOG.md").read_text()
    assert "## Unreleased\n\n## 0.3.0 (2030-01-02)\n\n- A feature.\n\n## 0.1.0" in changelog
    assert git(root, "log", "-1", "--format=%s") == "release: 0.3.0\n"
    assert git(root, "describe", "--exact-match") == "v0.3.0\n"
    assert git(root, "status", "--porcelain") == ""
    with pytest.raises(tool.RefusedError, match="nothing below"):
        tool.release(root, "0.4.0", TODAY, nothing)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.1.0", "must be newer than 0.1.0, which is released"),
        ("0.1.0rc1", "must be newer than 0.1.0, which is released"),
        ("0.1.9", r"must be at least 0.2.0, the version in pyproject.toml"),
        ("1.0", "must be x.y.z or x.y.zrcN, got '1.0'"),
        ("v1.0.0", "must be x.y.z or x.y.zrcN, got 'v1.0.0'"),
    ],
)
def test_release_of_a_bad_version_is_refused(root: Path, version: str, reason: str) -> None:
    before = git(root, "rev-parse", "HEAD")
    with pytest.raises(tool.RefusedError, match=reason):
        tool.release(root, version, TODAY, nothing)
    assert git(root, "rev-parse", "HEAD") == before


def test_release_of_a_dirty_tree_is_refused(root: Path) -> None:
    (root / "new.py").write_text("")
    with pytest.raises(tool.RefusedError, match=r"(?s)not committed.*new.py"):
        tool.release(root, "0.3.0", TODAY, nothing)


def test_release_without_a_changelog_is_refused(root: Path) -> None:
    git(root, "rm", "--quiet", "CHANGELOG.md")
    git(root, "commit", "--quiet", "--message", "none")
    with pytest.raises(tool.RefusedError, match=r"CHANGELOG.md has nothing below"):
        tool.release(root, "0.3.0", TODAY, nothing)


def test_release_whose_packages_fail_leaves_no_trace(root: Path) -> None:
    before = git(root, "rev-parse", "HEAD")
    with pytest.raises(tool.RefusedError, match="does not answer"):
        tool.release(root, "0.3.0", TODAY, refuse)
    assert git(root, "rev-parse", "HEAD") == before
    assert git(root, "tag") == "v0.1.0\n"
    assert git(root, "status", "--porcelain") == ""
    assert (root / "pyproject.toml").read_text() == PYPROJECT


def test_release_of_this_tree_finds_its_version_and_news() -> None:
    assert tool.order_of(tool.current_version(ROOT)) > (0, 0, 0)
    assert "\n## " not in tool.unreleased(ROOT)


def test_cross_compiler_is_debians_or_zigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = _tool("packages")
    other = next(machine for machine in packages.MACHINES if machine != platform.machine())
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packages.compiler_for(other) is None
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: name == "ziglang")
    command = packages.compiler_for(other)
    assert command[1:5] == ["-m", "ziglang", "c++", "-target"]
    assert command[5].startswith(f"{other}-linux-gnu.2.")
    assert packages.compiler_for(platform.machine()) is None
    program = packages.as_program(["/bin/echo", "a b"], tmp_path / "new")
    given = [program, "c", "-march=armv8.2-a+dotprod+i8mm", "-O3 d"]
    shown = subprocess.check_output(given, text=True)
    assert shown == "a b c -mcpu=generic+v8_2a+dotprod+i8mm -O3 d\n"  # Zig's name
    assert packages.as_program(["/bin/echo"], tmp_path) == "/bin/echo"


def test_library_of_another_machine_is_not_packed(tmp_path: Path) -> None:
    packages = _tool("packages")
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF" + bytes(14) + (183).to_bytes(2, "little"))
    packages.check_machine(library, "aarch64")
    with pytest.raises(SystemExit, match="no library for x86_64"):
        packages.check_machine(library, "x86_64")
    library.write_bytes(b"text")
    with pytest.raises(SystemExit, match="no library for aarch64"):
        packages.check_machine(library, "aarch64")


@pytest.mark.more
def test_wheel_in_an_empty_environment_answers(tmp_path: Path) -> None:
    machine = subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
    command = ["make", "wheel", f"MACHINES={machine}", f"DIST={tmp_path / 'dist'}"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith(f"manylinux_2_28_{machine}.whl")
    tool.try_wheel(wheel, ROOT / "constraints.txt", tmp_path)


@pytest.mark.more
def test_wheel_without_a_compiler_is_for_any_machine(tmp_path: Path) -> None:
    code = f"import build_backend; print(build_backend.build_wheel({str(tmp_path)!r}))"
    environment = {"PATH": "/usr/bin:/bin", "CXX": "/nonexistent/c++", "PYTHONPATH": str(ROOT / "tools")}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "backend")]
    subprocess.run([*pip, "scikit-build-core>=0.11,<2"], check=True)
    environment["PYTHONPATH"] += f":{tmp_path / 'backend'}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert "no C++ compiler found" in done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
