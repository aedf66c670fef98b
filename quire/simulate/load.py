"""Loads: requests with arrival times, described by distributions, listed in a file or taken from a recorded run.

Invariant: a described load depends on its description and seed only. Token ids stand for texts: equal ids are equal
texts, so prefixes that requests share are shared in the simulated cache as well.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from quire.bench.workload import arrival_times
from quire.engine.trace import Added, Planned, Returned, Trace
from quire.errors import ConfigError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 2**24  # of a request; more than any model's context
VOCABULARY = 2**31  # so that texts that are drawn apart never share a block


@dataclass(frozen=True)
class SimulatedRequest:
    """One request: arrival in seconds, its prompt, the tokens that it generates, its tenant and its priority."""

    arrival_s: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Lengths:
    """Distribution of token counts, written as `512`, `100-900` (uniform) or `~512` (log-normal around this median)."""

    text: str
    draw: Callable[[random.Random], int] = field(compare=False)


_FIXED = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_AROUND = re.compile(r"~([0-9]+)")
SIGMA = 0.6  # Of the log-normal distribution: 90 % lie between 0.37 and 2.7 times the median.


def parse_lengths(text: str, flag: str) -> Lengths:
    """Return the distribution that a text describes.

    Raises:
        ConfigError: it describes none.
    """
    if (match := _FIXED.fullmatch(text)) is not None:
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high <= MAX_TOKENS:
            return Lengths(text, lambda generator: generator.randint(low, high))
    if (match := _AROUND.fullmatch(text)) is not None and 1 <= int(match[1]) <= MAX_TOKENS:
        mu = math.log(int(match[1]))
        return Lengths(
            text, lambda generator: min(max(round(generator.lognormvariate(mu, SIGMA)), 1), MAX_TOKENS)
        )
    raise ConfigError(
        f"{flag} is {text!r}; write 512, 100-900 (uniform) or ~512 (log-normal around 512), from 1 on"
    )


@dataclass(frozen=True)
class LoadDescription:
    """Load of independent requests.

    Args:
        num_requests: their number.
        rate: arrivals per second of a Poisson process; infinite: all at once.
        prompt_tokens, output_tokens: their lengths.
        prefix_tokens: tokens at the beginning of every prompt that its group shares, beside `prompt_tokens`.
        prefix_groups: groups; each request belongs to one by chance.
        seed: of all that is drawn.
    """

    num_requests: int = 200
    rate: float = math.inf
    prompt_tokens: str = "512"
    output_tokens: str = "128"
    prefix_tokens: int = 0
    prefix_groups: int = 1
    seed: int = 0

    def requests(self) -> list[SimulatedRequest]:
        """Return the requests in order of arrival.

        Raises:
            ConfigError: a number is out of range.
        """
        prompts = parse_lengths(self.prompt_tokens, "--prompt-tokens")
        outputs = parse_lengths(self.output_tokens, "--output-tokens")
        self._check()
        generator = random.Random(self.seed)
        prefixes = [_text(generator, self.prefix_tokens) for _ in range(self.prefix_groups)]
        return [
            SimulatedRequest(
                arrival,
                [*generator.choice(prefixes), *_text(generator, prompts.draw(generator))],
                outputs.draw(generator),
            )
            for arrival in arrival_times(self.num_requests, self.rate, self.seed)
        ]

    def _check(self) -> None:
        for flag, value, most in (
            ("--num-requests", self.num_requests, MAX_REQUESTS),
            ("--prefix-groups", self.prefix_groups, MAX_REQUESTS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} must be from 1 to {most}, got {value}")
        if not 0 <= self.prefix_tokens <= MAX_TOKENS:
            raise ConfigError(f"--prefix-tokens must be from 0 to {MAX_TOKENS}, got {self.prefix_tokens}")
        if not self.rate > 0.0:
            raise ConfigError(f"--rate must be above 0 requests per second, or inf, got {self.rate}")


def _text(generator: random.Random, num_tokens: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(num_tokens)]


Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class LoadLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a load file.

    Args:
        arrival_s: seconds after the start.
        prompt_tokens: length of the whole prompt.
        output_tokens: tokens that it generates.
        prefix: name of the text with which the prompt begins; prompts with one name begin alike.
        prefix_tokens: its length in this prompt.
        tenant, priority: of the request.
    """

    arrival_s: Annotated[float, msgspec.Meta(ge=0.0)]
    prompt_tokens: Count
    output_tokens: Count
    prefix: str = ""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    tenant: str = ""
    priority: int = 0


def read_load(path: Path, seed: int = 0) -> list[SimulatedRequest]:
    """Read a load file, one JSON object per line (`LoadLine`), in order of arrival.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            requests.append(_request_of(_read_line(path, number, line), number, seed))
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise ConfigError(f"{path} has {len(requests)} requests; a load has from 1 to {MAX_REQUESTS}")
    return sorted(requests, key=lambda request: request.arrival_s)


def _read_line(path: Path, number: int, line: str) -> LoadLine:
    try:
        read = msgspec.json.decode(line, type=LoadLine)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    if read.prefix_tokens > read.prompt_tokens:
        raise ConfigError(
            f"{path}, line {number}: prefix_tokens ({read.prefix_tokens}) exceed prompt_tokens ({read.prompt_tokens})"
        )
    if read.prefix_tokens and not read.prefix:
        raise ConfigError(f"{path}, line {number}: prefix_tokens need the prefix's name in `prefix`")
    return read


def _request_of(line: LoadLine, number: int, seed: int) -> SimulatedRequest:
    shared = _text(random.Random(f"{seed} prefix {line.prefix}"), line.prefix_tokens)
    own = _text(random.Random(f"{seed} line {number}"), line.prompt_tokens - line.prefix_tokens)
    return SimulatedRequest(line.arrival_s, [*shared, *own], line.output_tokens, line.tenant, line.priority)


def recorded_load(trace: Trace) -> list[SimulatedRequest]:
    """Return the requests of a recorded run, with their prompts and the numbers of tokens that they generated.

    Forks of one prompt are requests of their own. Requests that sampled nothing are left out.
    """
    added = {frame.number: frame for frame in trace.frames if isinstance(frame, Added)}
    sampled = dict.fromkeys(added, 0)
    for number, count in _sampled(trace):
        sampled[number] = sampled.get(number, 0) + count
    first = min((frame.now for frame in added.values()), default=0.0)
    return [
        SimulatedRequest(
            frame.now - first,
            frame.request.prompt_token_ids,
            sampled[number],
            frame.request.tenant,
            frame.request.priority,
        )
        for number, frame in added.items()
        if sampled[number]
    ]


def _sampled(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield request numbers with the tokens that a step sampled for them."""
    plans = {frame.step_id: frame.numbers for frame in trace.frames if isinstance(frame, Planned)}
    for frame in trace.frames:
        if isinstance(frame, Returned):
            counts = map(len, frame.sampled)
            yield from itertools.compress(zip(plans[frame.step_id], counts, strict=True), frame.sampled)
