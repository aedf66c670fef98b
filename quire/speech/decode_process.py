# SPDX-License-Identifier: Apache-2.0
"""Process that decodes one sound file: `python -m quire.speech.decode_process SOURCE TARGET MAX_SECONDS`.

Its reply is one JSON object on standard output: `samples`, or `error` with words for the client. Invariant: a file that
crashes a decoder, or makes it allocate without bound, costs this process only.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from quire.errors import ValidationError
from quire.processes import GROUP_SIGNALS, limit_memory
from quire.speech.audio import decode

MEMORY_BYTES = 2**30  # Beyond what the process has when it begins.


def main() -> None:
    """Decode, and write the reply."""
    for one in GROUP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    limit_memory(MEMORY_BYTES)
    source, target, max_seconds = sys.argv[1:]
    reply: dict[str, object]
    try:
        reply = {"samples": decode(Path(source), Path(target), float(max_seconds))}
    except ValidationError as error:
        reply = {"error": error.message}
    except MemoryError:
        reply = {"error": "the sound takes too much memory to decode"}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
