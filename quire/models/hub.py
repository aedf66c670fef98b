# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models by id: their files on this machine, downloaded if necessary.

Invariant: no network access is needed if the cache has the files; `HF_HUB_OFFLINE=1` forbids it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from quire.errors import ModelLoadError
from quire.models.gguf.model import (
    SUFFIX,
    choose_projector,
    is_first_part,
    is_projector,
    part_names,
    part_paths,
)

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

# No pickled weights and no code: only files that quire reads.
_WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_MAX_LISTED = 24


@dataclass(frozen=True)
class HubModel:
    """Hugging Face id `owner/name`, optionally followed by a colon and one of its GGUF models.

    The GGUF model is given by its quantization (Q4_K_M, in either case) or file name.
    """

    id: str
    gguf: str | None
    revision: str | None
    cache_dir: str | None

    def find(self) -> Path:
        """Return its directory in the cache, or its GGUF file, the first one if it is split.

        Raises:
            ModelLoadError: there is no such model, it cannot be fetched, or there is not exactly one such file.
        """
        if self.gguf is not None:
            return self._gguf(self.gguf)
        directory = self._snapshot(_WANTED_FILES)
        has_weights = any(directory.glob("*.safetensors"))
        return directory if has_weights or not _models(self._gguf_files()) else self._gguf("")

    def blobs(self) -> Path:
        """Return the directory of its files in the cache, which may not exist yet."""
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(self.cache_dir or HF_HUB_CACHE) / f"models--{self.id.replace('/', '--')}" / "blobs"

    def size(self) -> tuple[int, int]:
        """Return the bytes of the files that `find` needs, and of those of them that are not in the cache.

        Both are 0 if Hugging Face cannot be asked.

        Raises:
            ModelLoadError: as `find`.
        """
        from huggingface_hub import errors

        patterns = _WANTED_FILES if self.gguf is None else self._gguf_patterns(self.gguf)
        with self._explained():
            try:
                infos = self._planned(patterns)
                has_weights = any(info.filename.endswith(".safetensors") for info in infos)
                if self.gguf is None and not has_weights and _models(self._gguf_files()):
                    infos = self._planned(self._gguf_patterns(""))
            except errors.DryRunError:
                return 0, 0
        sizes = [(info.file_size or 0, info.will_download) for info in infos]
        return sum(size for size, _ in sizes), sum(size for size, is_missing in sizes if is_missing)

    def _planned(self, patterns: Sequence[str]) -> list[DryRunFileInfo]:
        """Return what a download of the files of these patterns would do. Raises as Hugging Face's library does."""
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.id,
            revision=self.revision,
            cache_dir=self.cache_dir,
            allow_patterns=list(patterns),
            dry_run=True,
        )

    def _gguf_patterns(self, wanted: str) -> list[str]:
        return [escape(name) for name in self._gguf_names(wanted)]

    def _gguf(self, wanted: str) -> Path:
        names = self._gguf_names(wanted)
        directory = self._snapshot([escape(name) for name in names])
        return part_paths(directory / names[0])[0]

    def _gguf_names(self, wanted: str) -> list[str]:
        """Return the names of the files of the GGUF model, and of its encoder.

        Raises:
            ModelLoadError: there is not exactly one model.
        """
        files = self._gguf_files()
        there = _models(files)
        found = [name for name in there if wanted == name or wanted == PurePosixPath(name).name]
        found = found or [name for name in there if _is_quantized_as(name, wanted)]
        if len(found) != 1:
            raise ModelLoadError(f"{self.id} has {_how_many(found, wanted)}: {self._choice(found or there)}")
        folder = PurePosixPath(found[0]).parent
        encoder = choose_projector([name for name in files if PurePosixPath(name).parent == folder])
        return [*part_names(found[0]), *([] if encoder is None else [encoder])]

    def _choice(self, names: Sequence[str]) -> str:
        if not names:
            return "it has no GGUF files at all"
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        listed = ", ".join(names[:_MAX_LISTED]) + more
        return f"name one as {self.id}:{PurePosixPath(names[0]).name}; there are {listed}"

    def _gguf_files(self) -> list[str]:
        """Return the GGUF files of the repository, or of the cache."""
        from huggingface_hub import errors

        with self._explained():
            try:
                return sorted(info.filename for info in self._planned([f"*{SUFFIX}"]))
            except errors.DryRunError:
                directory = self._snapshot([])
                return sorted(
                    path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}")
                )

    def _snapshot(self, patterns: Sequence[str]) -> Path:
        """Return the model's cache directory, containing at least the files of these patterns."""
        # Imported here: it costs a tenth of a second that local models need not spend.
        from huggingface_hub import snapshot_download

        with self._explained():
            return Path(
                snapshot_download(
                    self.id, revision=self.revision, cache_dir=self.cache_dir, allow_patterns=list(patterns)
                )
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert Hugging Face errors to messages for users."""
        from huggingface_hub import errors

        reasons = (
            (errors.HFValidationError, "is neither a directory nor a valid Hugging Face id"),
            (errors.LocalEntryNotFoundError, self._unreachable()),
            (errors.GatedRepoError, "is gated: ask for access on its Hugging Face page and set HF_TOKEN"),
            (errors.RepositoryNotFoundError, "is neither a directory nor a public model on Hugging Face"),
            (errors.RevisionNotFoundError, "is on Hugging Face, but not in this revision"),
        )
        try:
            yield
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            name = f"{self.id}:{self.gguf}" if self.gguf else self.id
            what = f"model {name!r}" + (f" at revision {self.revision!r}" if self.revision else "")
            reason = next(
                (text for kind, text in reasons if isinstance(error, kind)), f"cannot be fetched: {error}"
            )
            raise ModelLoadError(f"{what} {reason}") from error

    def _unreachable(self) -> str:
        """Return the reason why a model that is not in the cache cannot be fetched, and the remedies."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return "is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset it, or name a directory"
        return (
            f"is not on this machine, and {constants.ENDPOINT} cannot be reached: check the network, HTTPS_PROXY and "
            "HF_ENDPOINT, or name a directory with the model's files; a gated model needs HF_TOKEN as well"
        )


def _is_quantized_as(name: str, wanted: str) -> bool:
    """Return whether the words of a name contain those of `wanted` in a row; words end at a dash, dot or slash.

    An empty `wanted` matches nothing.
    """
    word = rf"(^|[-./_]){re.escape(wanted)}[-./]" if wanted else ""
    return re.search(word, name, re.IGNORECASE) is not None


def _models(files: Sequence[str]) -> list[str]:
    """Return the models among GGUF files; the first file of a split one."""
    names = ((name, PurePosixPath(name).name) for name in files)
    return [path for path, name in names if is_first_part(name) and not is_projector(name)]


def _how_many(found: Sequence[str], wanted: str) -> str:
    count = len(found) or "no"
    return f"{count} GGUF models" + (f" {wanted!r}" if wanted else "")


def cached_ids(cache_dir: str | None) -> list[str]:
    """Return the ids of the models in Hugging Face's cache, none if it cannot be read; `cache_dir` as in `HubModel`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    prefix = "models--"
    cache = Path(cache_dir or HF_HUB_CACHE)
    names = os.listdir(cache) if os.access(cache, os.R_OK | os.X_OK) else []
    return sorted(name.removeprefix(prefix).replace("--", "/") for name in names if name.startswith(prefix))
