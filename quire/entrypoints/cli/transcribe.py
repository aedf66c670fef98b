# SPDX-License-Identifier: Apache-2.0
"""`quire transcribe`: write the transcripts of sound files, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from quire.entrypoints.cli.options import EngineCommand, engine_config
from quire.errors import ValidationError
from quire.torch_import import hastened_import


@click.command(cls=EngineCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--srt", "form", flag_value="srt", help="Write subtitles in SubRip's form.")
@click.option("--vtt", "form", flag_value="vtt", help="Write subtitles in WebVTT's form.")
@click.option("--json", "form", flag_value="json", help="Write segments with times and probabilities.")
@click.option("--words", is_flag=True, help="Give each word its times: a subtitle each, or a list in JSON.")
@click.option("--language", help="Code or name of the language.  [default: detected]")
@click.option("--translate", is_flag=True, help="Write English, whatever the language.")
@click.option("--prompt", default="", help="Text that precedes the sound, for its names and style.")
@click.option("--hotwords", default="", help="Words that are likely in the sound.")
@click.option("--vad-filter", is_flag=True, help="Skip what has no voice; needs the package silero-vad.")
@click.option("--temperature", type=click.FLOAT, help="The only one tried.  [default: 0, 0.2 ... 1.0]")
@click.option("--beam-size", type=click.IntRange(1, 64), default=1, help="Beams of a search.  [default: 1]")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a file per sound.  [default: standard output]",
)
def transcribe(
    files: tuple[Path, ...],
    form: str | None,
    words: bool,
    language: str | None,
    translate: bool,
    prompt: str,
    hotwords: str,
    vad_filter: bool,
    temperature: float | None,
    beam_size: int,
    output_dir: Path | None,
    **params: Any,
) -> None:
    """Transcribe sound FILES with a Whisper model (`--model`), with a progress bar on a terminal.

    A file that cannot be read is named on standard error; the others are transcribed, and the exit code is 1.
    """
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise click.UsageError(f"there is no file {str(missing)!r}")
    config = engine_config(params)
    form = form or "text"
    if words and form == "text":
        raise click.UsageError("--words needs --srt, --vtt or --json")
    targets = [_target(file, form, output_dir) for file in files]
    twice = next((one for at, one in enumerate(targets) if one and one in targets[:at]), None)
    if twice is not None:
        raise click.UsageError(
            f"two files would be written to {str(twice)!r}; transcribe one of them by itself"
        )

    with hastened_import():
        from quire.engine.llm_engine import LLMEngine
        from quire.speech.formats import WRITERS
        from quire.speech.offline import EngineSpeech, options_of

        task = "translate" if translate else "transcribe"
        wants = {
            "timestamps": form != "text",
            "words": words,
            "vad_filter": vad_filter,
            "beam_size": beam_size,
        }
        options = options_of(language, task, prompt, temperature, hotwords=hotwords, **wants)
        engine = LLMEngine(config)
    try:
        speech = EngineSpeech(engine)
        try:
            refused: dict[int, ValidationError] = {}
            found = iter(speech.transcribe(files, options, use_tqdm=True, refused=refused))
            for index, target in enumerate(targets):
                if index not in refused:
                    _write(target, WRITERS[form](next(found), words=words))
        finally:
            speech.close()
    finally:
        engine.shutdown()
    for error in refused.values():
        click.echo(f"error: {error}", err=True)
    if refused:
        raise click.exceptions.Exit(1)


def _target(file: Path, form: str, output_dir: Path | None) -> Path | None:
    """Return the file of a transcript; None: standard output."""
    return None if output_dir is None else output_dir / f"{file.stem}.{'txt' if form == 'text' else form}"


def _write(target: Path | None, content: str) -> None:
    if target is None:
        sys.stdout.write(content)
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"{target} cannot be written: {error.strerror}") from None
