# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's cache.

Invariant: torch-free. Only what Hugging Face's own library finds in its cache is listed or removed, by its functions; a
name never becomes a path here.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quire.errors import ConfigError

GGUF = ".gguf"
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:\w[\w./-]*)?")
WEIGHTS = (".safetensors", GGUF)


@dataclass(frozen=True)
class CachedModel:
    """One model of the cache.

    Args:
        id: owner/name.
        size_bytes: on the disk, all revisions together.
        last_used: seconds since 1970.
        files: names of its weight files in the newest revision.
        revisions: their commit hashes.
    """

    id: str
    size_bytes: int
    last_used: float
    files: tuple[str, ...]
    revisions: tuple[str, ...]

    @property
    def form(self) -> str:
        """Form of its weights, in a word."""
        forms = {PurePosixPath(name).suffix.removeprefix(".") for name in self.files}
        return " and ".join(sorted(forms)) or "no weights"


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a Hugging Face id, optionally with one of its GGUF files."""
    return _ID.fullmatch(name) is not None


def cached_models(cache_dir: str | None) -> list[CachedModel]:
    """Return the models in the cache, the last used first.

    Args:
        cache_dir: None: Hugging Face's own (HF_HOME).

    Raises:
        ConfigError: the directory cannot be read.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(cache_dir)
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"the cache of Hugging Face models cannot be read (HF_HOME): {error}") from None
    models = []
    for repo in found.repos:
        if repo.repo_type != "model":
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        names = [] if newest is None else [file.file_name for file in newest.files]
        weights = tuple(sorted(name for name in names if name.endswith(WEIGHTS)))
        revisions = tuple(revision.commit_hash for revision in repo.revisions)
        models.append(CachedModel(repo.repo_id, repo.size_on_disk, repo.last_accessed, weights, revisions))
    return sorted(models, key=lambda model: (-model.last_used, model.id))


def cached_model(name: str, cache_dir: str | None) -> CachedModel:
    """Return the model of this id.

    Raises:
        ConfigError: it is not in the cache; names what is.
    """
    models = cached_models(cache_dir)
    for model in models:
        if model.id == name:
            return model
    there = ", ".join(model.id for model in models) or "none"
    raise ConfigError(f"{name!r} is not in the cache of Hugging Face models; there are: {there}")


def remove(model: CachedModel, cache_dir: str | None) -> int:
    """Remove all revisions of a model from the cache; return the freed bytes.

    An engine that runs with it goes on, since it has its files open or read; its next start fetches them again.
    """
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(cache_dir)
    strategy = found.delete_revisions(*model.revisions)
    strategy.execute()
    for repo in found.repos:  # what an interrupted download left has no revision
        if (repo.repo_type, repo.repo_id) == ("model", model.id) and not repo.revisions:
            shutil.rmtree(repo.repo_path)
    return strategy.expected_freed_size


def size_text(num_bytes: float) -> str:
    """Return a size for people: `2.50 GB`, or `4.83 MB` if it is less than a tenth of one."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def size_of_tree(path: Path) -> int:
    """Return the bytes of a model's files: of a GGUF file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
