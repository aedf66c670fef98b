"""How many guesses of each request to verify in a step."""

from __future__ import annotations

from collections.abc import Sequence

from quire.spec_decode.step_costs import StepCosts


def choose_depth(
    rates: Sequence[float],
    most: int,
    num_requests: int,
    costs: StepCosts,
    seconds_each: float,
    num_ahead: int = 0,
) -> int:
    """How many tokens a drafter that takes time should guess for each of some requests; 0 if it does not pay.

    Args:
        rates: [D] probability that a guess for a request is right if those before it are.
        most: tokens that it may guess.
        num_requests: that the step has in any case; nothing is chosen until such steps were timed.
        costs: of steps.
        seconds_each: that the drafter takes to guess a token more for all of them.
        num_ahead: tokens that steps in flight sample anyway.
    """
    if not costs.knows(num_requests):
        return 0
    best, depth, tokens = num_requests / costs.of(num_requests), 0, float(num_requests)
    for place in range(num_ahead + 1, most + 1):
        tokens += sum([rate**place for rate in rates])
        width = num_requests + len(rates) * (place - num_ahead)
        rate = tokens / (costs.of(width) + place * seconds_each)
        if rate > best:
            best, depth = rate, place
    return depth


def choose_lengths(
    rates: Sequence[float], lengths: Sequence[int], num_requests: int, costs: StepCosts, num_ahead: int = 0
) -> list[int]:
    """The first so many guesses of each draft, such that a step gives the most tokens for its time.

    What a guess adds is the probability that it and all before it are right. So guesses are taken in the order of that,
    as long as it pays in the end.

    Args:
        rates: [D] probability that a guess of a draft is right if those before it are.
        lengths: [D] guesses there are.
        num_requests: that the step has in any case, a token each; nothing is chosen until such steps were timed.
        costs: of steps.
        num_ahead: tokens of each draft that steps in flight sample anyway: they must be right, and cost nothing.
    """
    if not costs.knows(num_requests):  # then it is to be found out
        return [0] * len(rates)
    gains: list[tuple[float, int]] = []
    for draft, rate in enumerate(rates):
        gain = -(rate**num_ahead)
        for _ in range(num_ahead, lengths[draft]):
            gain *= rate
            gains.append((gain, draft))
    if len(rates) > 1:
        gains.sort()
    gains.append((0.0, 0))  # behind the last
    chosen, count, best, tokens = [0] * len(rates), 0, 0.0, float(num_requests)
    for number, (seconds, (gain, _)) in enumerate(
        zip(costs.rising(num_requests, len(gains)), gains, strict=False)
    ):
        if tokens > best * seconds:
            best, count = tokens / seconds, number
        tokens -= gain
    for _, draft in gains[:count]:
        chosen[draft] += 1
    return [count and count + num_ahead for count in chosen]
