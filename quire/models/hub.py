"""Models by their Hugging Face id: the files of one, on this machine, downloaded if need be.

Invariant: no network where the cache has what is asked for and Hugging Face cannot be reached; `HF_HUB_OFFLINE=1` says
that it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath

from quire.errors import ModelLoadError
from quire.models.gguf.model import SUFFIX, is_first_part, part_names, part_paths

# No pickled weights and no code: only what quire can read.
_WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_PROJECTOR = "mmproj"
"""How files begin that have no language model, but what turns images into its embeddings."""
_MAX_LISTED = 24


@dataclass(frozen=True)
class HubModel:
    """What Hugging Face calls a model: `owner/name`, and perhaps, behind a colon, one of the GGUF models in it.

    That is named as it was quantized (Q4_K_M, in either case) or by its file.
    """

    id: str
    gguf: str | None
    revision: str | None
    cache_dir: str | None

    def find(self) -> Path:
        """Its directory in the cache, or its GGUF file, of several the first one.

        Raises:
            ModelLoadError: there is no such model, it cannot be fetched, or there is not exactly one such file.
        """
        if self.gguf is not None:
            return self._gguf(self.gguf)
        directory = self._snapshot(_WANTED_FILES)
        has_weights = any(directory.glob("*.safetensors"))
        return directory if has_weights or not self._ggufs() else self._gguf("")

    def _gguf(self, wanted: str) -> Path:
        there = self._ggufs()
        found = [name for name in there if wanted == name or wanted == PurePosixPath(name).name]
        found = found or [name for name in there if _is_quantized_as(name, wanted)]
        if len(found) != 1:
            raise ModelLoadError(f"{self.id} has {_how_many(found, wanted)}: {self._choice(found or there)}")
        directory = self._snapshot([escape(part) for part in part_names(found[0])])
        return part_paths(directory / found[0])[0]

    def _choice(self, names: Sequence[str]) -> str:
        if not names:
            return "it has no GGUF files at all"
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        listed = ", ".join(names[:_MAX_LISTED]) + more
        return f"name one as {self.id}:{PurePosixPath(names[0]).name}; there are {listed}"

    def _ggufs(self) -> list[str]:
        """The GGUF models of the repository, or of what the cache has of it; of a split one, the first file."""
        from huggingface_hub import errors, snapshot_download

        with self._explained():
            try:
                infos = snapshot_download(
                    self.id,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    allow_patterns=[f"*{SUFFIX}"],
                    dry_run=True,
                )
                names = [info.filename for info in infos]
            except errors.DryRunError:
                directory = self._snapshot([])
                names = [path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}")]
        models = (PurePosixPath(name) for name in sorted(names))
        return [
            str(path) for path in models if is_first_part(path.name) and not path.name.startswith(_PROJECTOR)
        ]

    def _snapshot(self, patterns: Sequence[str]) -> Path:
        """The directory of the model in the cache, with the files of these names at least."""
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
        """What Hugging Face's own errors mean to a user."""
        from huggingface_hub import errors

        reasons = (
            (errors.HFValidationError, "is neither a directory nor a valid Hugging Face id"),
            (errors.LocalEntryNotFoundError, "is not on this machine, and Hugging Face cannot be reached"),
            (errors.GatedRepoError, "is gated: ask for access on its Hugging Face page and set HF_TOKEN"),
            (errors.RepositoryNotFoundError, "is neither a directory nor a public model on Hugging Face"),
            (errors.RevisionNotFoundError, "is on Hugging Face, but not in this revision"),
        )
        try:
            yield
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            what = f"model {self.id!r}" + (f" at revision {self.revision!r}" if self.revision else "")
            reason = next(
                (text for kind, text in reasons if isinstance(error, kind)), f"cannot be fetched: {error}"
            )
            raise ModelLoadError(f"{what} {reason}") from error


def _is_quantized_as(name: str, wanted: str) -> bool:
    """Whether a name's words have all of `wanted` in a row; words end at a dash, dot or slash. Nothing is in any."""
    word = rf"(^|[-./_]){re.escape(wanted)}[-./]" if wanted else ""
    return re.search(word, name, re.IGNORECASE) is not None


def _how_many(found: Sequence[str], wanted: str) -> str:
    count = len(found) or "no"
    return f"{count} GGUF models" + (f" {wanted!r}" if wanted else "")
