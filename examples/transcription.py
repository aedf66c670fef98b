# SPDX-License-Identifier: Apache-2.0
"""Transcribe sound files with a Whisper model.

python examples/transcription.py openai/whisper-tiny speech.wav
"""

import sys

from quire import LLM


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("give a Whisper model and one or more sound files")
    model, *files = sys.argv[1:]
    llm = LLM(model)
    for file, transcript in zip(files, llm.transcribe(files), strict=True):
        print(file)
        for part in transcript.segments:
            print(f"  {part.start:6.2f} - {part.end:6.2f}  {part.text.strip()}")


if __name__ == "__main__":
    main()
