# SPDX-License-Identifier: Apache-2.0
"""Release of a version: `python tools/release.py x.y.z` (`make release VERSION=x.y.z`). Nothing is uploaded.

It writes the version and the changelog's date, commits both, makes the packages, checks them as PyPI would, runs the
wheel in an empty environment, and tags the commit. If a step fails, the commit is taken back.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?")
_LINE = re.compile(r'(?m)^version = "(?P<version>[^"]+)"')
PROMPT, ANSWER = "What is the capital of France?", "Paris"


class RefusedError(Exception):
    """Release that cannot be made; the message names the reason and what to do."""


def order_of(version: str) -> tuple[int, ...]:
    """Return a key by which versions are ordered; a release candidate comes before its version.

    Raises:
        RefusedError: it is no x.y.z or x.y.zrcN.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise RefusedError(f"VERSION must be x.y.z or x.y.zrcN, got {version!r}")
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch), int(candidate is None), int(candidate or 0)


def git(root: Path, *arguments: str) -> str:
    """Run git and return its output without the last line's end.

    Raises:
        RefusedError: it fails.
    """
    done = subprocess.run(["git", *arguments], cwd=root, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RefusedError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def check(root: Path, version: str) -> None:
    """Refuse a release that cannot be made.

    Raises:
        RefusedError: the version is not newer than the last, files are not committed, or the changelog is empty.
    """
    new = order_of(version)
    if changed := git(root, "status", "--porcelain"):
        raise RefusedError(f"these files are not committed; commit or remove them first:\n{changed}")
    tags = [tag.removeprefix("v") for tag in git(root, "tag", "--list", "v*").split()]
    if newer := [tag for tag in tags if _VERSION.fullmatch(tag) and order_of(tag) >= new]:
        raise RefusedError(
            f"VERSION must be newer than {max(newer, key=order_of)}, which is released, got {version}"
        )
    current = current_version(root)
    if new < order_of(current):
        raise RefusedError(
            f"VERSION must be at least {current}, the version in pyproject.toml, got {version}"
        )
    if not unreleased(root):
        raise RefusedError('CHANGELOG.md has nothing below "## Unreleased": write what is new for users')


def current_version(root: Path) -> str:
    """Return the version in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def unreleased(root: Path) -> str:
    """Return the changelog's text about what is not released."""
    path = root / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.partition(UNRELEASED)[2].partition("\n## ")[0].strip()


def stamp(root: Path, version: str, date: datetime.date) -> None:
    """Write the version into pyproject.toml, and the version and the date into the changelog."""
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    text = project.read_text(encoding="utf-8")
    project.write_text(_LINE.sub(f'version = "{version}"', text, count=1), encoding="utf-8")
    text = changelog.read_text(encoding="utf-8")
    heading = f"{UNRELEASED}\n## {version} ({date.isoformat()})\n"
    changelog.write_text(text.replace(UNRELEASED, heading, 1), encoding="utf-8")


def release(root: Path, version: str, date: datetime.date, prove: Callable[[Path], None]) -> str:
    """Commit, prove and tag a version.

    Args:
        prove: makes the packages of a tree and checks them; raises RefusedError if one is not as it should be.

    Returns:
        The tag.

    Raises:
        RefusedError: nothing has changed.
    """
    check(root, version)
    before = git(root, "rev-parse", "HEAD")
    stamp(root, version, date)
    git(root, "commit", "--quiet", "--message", f"release: {version}", "pyproject.toml", "CHANGELOG.md")
    try:
        prove(root)
        git(root, "tag", "--annotate", f"v{version}", "--message", f"quire {version}")
    except BaseException:
        git(root, "reset", "--quiet", "--keep", before)
        raise
    return f"v{version}"


def prove_packages(root: Path) -> None:
    """Make the packages, check their metadata and README as PyPI does, and run the wheel in an empty environment.

    Raises:
        RefusedError: a step fails.
    """
    _run(sys.executable, root / "tools/packages.py", "--to", root / "dist")
    packages = sorted((root / "dist").iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *packages)
    wheel = next((path for path in packages if path.name.endswith(f"_{platform.machine()}.whl")), None)
    if wheel is None:
        raise RefusedError(f"no wheel for this machine ({platform.machine()}), so nothing can be tried")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, root / "constraints.txt", Path(folder))


def try_wheel(wheel: Path, constraints: Path, folder: Path) -> None:
    """Install a wheel into an empty environment, and have it answer without a compiler or git on the path.

    Raises:
        RefusedError: it cannot be installed, or answers something else.
    """
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    _run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel)
    done = subprocess.run(
        [python.with_name("quire"), "run", PROMPT],
        cwd=folder,
        env={"PATH": str(python.parent), "HOME": str(folder)},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 or ANSWER not in done.stdout:
        raise RefusedError(
            f"the installed wheel answers {done.stdout!r} (exit code {done.returncode}): {done.stderr}"
        )
    print(f"{wheel.name} in an empty environment: {done.stdout.strip()}")


def _run(*command: str | Path) -> None:
    if subprocess.run([str(part) for part in command], check=False).returncode != 0:
        raise RefusedError(f"this failed: {' '.join(map(str, command))}")


def main() -> int:
    """Release the version that the argument names."""
    if len(sys.argv) != 2:
        sys.exit("error: give the version: make release VERSION=x.y.z")
    try:
        tag = release(ROOT, sys.argv[1], datetime.date.today(), prove_packages)
    except RefusedError as error:
        sys.exit(f"error: {error}")
    print(
        f"{tag} is tagged, the packages are in dist/; to publish: git push --follow-tags; twine upload dist/*"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
