# SPDX-License-Identifier: Apache-2.0
"""Build backend of the package: scikit-build-core's, which compiles the C++ kernels if there is a compiler.

Without one the wheel holds Python files only, and is tagged `py3-none-any`, so that no installer takes it for one with
kernels. A compiler that fails is an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

COMPILERS = ("c++", "g++", "clang++")
CMAKE = "wheel.cmake"  # scikit-build-core's setting: run CMake or not

Settings = dict[str, str | list[str]]


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the C++ compiler: the one that CXX names, or else the first of COMPILERS on the path."""
    named = shlex.split(environment.get("CXX", ""))[:1]
    paths = (shutil.which(name, path=environment.get("PATH")) for name in named or COMPILERS)
    return next(filter(None, paths), None)


def with_kernels(given: Settings | None) -> Settings:
    """Return the settings of a build, without the kernels if nothing can compile them."""
    settings = dict(given or {})
    if CMAKE not in settings and find_compiler() is None:
        print("quire: no C++ compiler found; the package gets no kernels and will be slow", file=sys.stderr)
        settings[CMAKE] = "false"
    return settings


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> Any:
    """Write a wheel into a directory and return its file name."""
    return build.build_wheel(wheel_directory, with_kernels(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> Any:
    """Write a wheel that points into the source tree, and return its file name."""
    return build.build_editable(wheel_directory, with_kernels(config_settings), metadata_directory)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> Any:
    """Return the packages that the build needs, CMake among them if it is needed and not installed."""
    return build.get_requires_for_build_wheel(with_kernels(config_settings))


def get_requires_for_build_editable(config_settings: Settings | None = None) -> Any:
    """Return the packages that an editable build needs."""
    return build.get_requires_for_build_editable(with_kernels(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> Any:
    """Write the wheel's metadata into a directory, and return its name."""
    return build.prepare_metadata_for_build_wheel(metadata_directory, with_kernels(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> Any:
    """Write the metadata of an editable wheel into a directory, and return its name."""
    return build.prepare_metadata_for_build_editable(metadata_directory, with_kernels(config_settings))
