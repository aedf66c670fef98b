# SPDX-License-Identifier: Apache-2.0
"""Process that decodes and resizes images: `python -m quire.multimodal.door.decode_process`.

Invariant: it is single-threaded, has a limit of address space, and reads jobs from stdin until that ends. Its parent
kills it when a job takes too long. An error of a job is part of its reply; anything else ends the process.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ClientError, ValidationError
from quire.multimodal.arrays import write_arrays
from quire.multimodal.door.decoding import (
    AUDIO,
    EMBEDS,
    FRAMES,
    RAW,
    VIDEO,
    layout_of,
    name_of,
    prepare_image,
    read_embeds,
    read_image,
    read_raw,
)
from quire.multimodal.door.jobs import DecodeJob, DecodeReply, DecodeSetup
from quire.multimodal.door.layout import PlaceholderLayout
from quire.multimodal.processors.base import Processor, make_processor
from quire.multimodal.processors.video import VideoFacts
from quire.processes import limit_memory, read_frame, write_frame


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    frame = read_frame(source)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=DecodeSetup)
    warnings.simplefilter("ignore")  # Pillow's, about the files of clients
    processor = make_processor(setup.architecture, Path(setup.model_dir), setup.options)
    if processor is None:
        raise SystemExit(f"{setup.architecture} takes no images")
    limit_memory(setup.memory_bytes)
    write_frame(sink, b"ready")
    while (frame := read_frame(source)) is not None:
        reply = run(msgspec.msgpack.decode(frame, type=DecodeJob), processor, setup)
        write_frame(sink, msgspec.msgpack.encode(reply))


def run(job: DecodeJob, processor: Processor, setup: DecodeSetup) -> DecodeReply:
    """Execute a job; errors of its content are in the reply."""
    try:
        arrays, layout = _prepared(job, processor)
        return DecodeReply(layout, num_bytes=write_arrays(Path(job.output), arrays))
    except ClientError as error:
        return DecodeReply(error=error.message, param=error.param or "")
    except MemoryError:
        return DecodeReply(
            error=f"the {name_of(job.kind)} needs more than {setup.memory_bytes >> 20} MiB to decode and resize"
        )


def _prepared(job: DecodeJob, processor: Processor) -> tuple[dict[str, NDArray[Any]], PlaceholderLayout]:
    if job.kind == AUDIO:
        from quire.multimodal.door.sound import prepare_sound

        scratch = Path(job.output).with_suffix(".pcm")
        return prepare_sound(Path(job.input), scratch, processor.sounds, job.max_seconds, job.options)
    content = Path(job.input).read_bytes()
    if job.kind == EMBEDS:
        arrays = read_embeds(content)
        if arrays["values"].shape[1] != job.hidden_size:
            raise ValidationError(
                f"embeddings must have {job.hidden_size} numbers each, got {arrays['values'].shape[1]}"
            )
        return arrays, layout_of(processor.prepare_embeds(arrays["values"]))
    if job.kind in (VIDEO, FRAMES):
        return _prepared_video(job, content, processor)
    if job.kind == RAW:
        return prepare_image(processor, read_raw(content, (job.size[0], job.size[1])), job.options)
    return prepare_image(processor, read_image(content, job.max_pixels), job.options)


def _prepared_video(
    job: DecodeJob, content: bytes, processor: Processor
) -> tuple[dict[str, NDArray[Any]], PlaceholderLayout]:
    from quire.multimodal.door.video import read_video

    videos = processor.videos
    if videos is None:
        raise ValidationError("this model takes no videos")
    if job.kind == VIDEO:
        decoded = read_video(content, videos, job.options, job.max_pixels)
        return decoded.prepared.arrays, layout_of(decoded.prepared, decoded.num_pixels)
    count, height, width = job.size
    frames = np.frombuffer(content, np.uint8).reshape(count, height, width, 3)
    facts = VideoFacts(job.num_frames or count, (height, width), job.fps, False, job.chosen)
    clip = videos.sample(facts, job.options)
    prepared = videos.prepare(clip, (frames[index] for index in clip.reads), job.options)
    return prepared.arrays, layout_of(prepared, len(clip.reads) * height * width)


if __name__ == "__main__":
    main()
