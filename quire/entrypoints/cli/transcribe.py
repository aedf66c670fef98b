# SPDX-License-Identifier: Apache-2.0
"""`quire transcribe`: write the transcripts of sound files, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.entrypoints.cli.options import EngineCommand, engine_config
from quire.errors import ValidationError
from quire.torch_import import hastened_import

if TYPE_CHECKING:
    from quire.speech.transcript import Transcription


@click.command(cls=EngineCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--srt", "form", flag_value="srt", help="Write subtitles in SubRip's form.")
@click.option("--vtt", "form", flag_value="vtt", help="Write subtitles in WebVTT's form.")
@click.option("--json", "form", flag_value="json", help="Write segments with times and probabilities.")
@click.option("--language", help="Code or name of the language.  [default: detected]")
@click.option("--translate", is_flag=True, help="Write English, whatever the language.")
@click.option("--prompt", default="", help="Text that precedes the sound, for its names and style.")
@click.option("--temperature", type=click.FLOAT, help="The only one tried.  [default: 0, 0.2 ... 1.0]")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a file per sound.  [default: standard output]",
)
def transcribe(
    files: tuple[Path, ...],
    form: str | None,
    language: str | None,
    translate: bool,
    prompt: str,
    temperature: float | None,
    output_dir: Path | None,
    **params: Any,
) -> None:
    """Transcribe sound FILES with a Whisper model (`--model`), with a progress bar on a terminal."""
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise click.UsageError(f"there is no file {str(missing)!r}")
    config = engine_config(params)
    form = form or "text"

    with hastened_import():
        from quire.engine.llm_engine import LLMEngine
        from quire.speech.offline import EngineSpeech, options_of

        task = "translate" if translate else "transcribe"
        options = options_of(language, task, prompt, temperature, timestamps=form != "text")
        engine = LLMEngine(config)
    try:
        speech = EngineSpeech(engine)
        try:
            for file, found in zip(files, speech.transcribe(files, options, use_tqdm=True), strict=True):
                _write(file, found, form, output_dir)
        finally:
            speech.close()
    finally:
        engine.shutdown()


def _write(file: Path, found: Transcription, form: str, output_dir: Path | None) -> None:
    from quire.speech.formats import WRITERS

    content = WRITERS[form](found)
    if output_dir is None:
        sys.stdout.write(content)
        return
    target = output_dir / f"{file.stem}.{'txt' if form == 'text' else form}"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"{target} cannot be written: {error.strerror}") from None
