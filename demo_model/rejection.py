# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance of the companion's drafts by classic rejection sampling, from both models' probabilities.

A token x that was drawn from the model's p came from a guess that was accepted with probability min(1, q(x) / p(x)),
where q is the companion's: a guess is x and accepted with probability min(p(x), q(x)). (Y. Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023.) So texts that the model has sampled tell the expected
number of steps that would have given them, without a step of that kind being run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Answered(NamedTuple):
    """A prompt and what the model has said to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


def expected_steps(accepted: Sequence[float], num_guesses: int) -> float:
    """Steps that verify so many guesses each, until there is a text of which each token is accepted with a probability.

    A step gives the accepted guesses and one token behind them.
    """
    steps = [0.0] * (len(accepted) + num_guesses + 2)
    for start in reversed(range(len(accepted))):
        reached, expected = 1.0, 1.0
        for count, chance in enumerate(accepted[start : start + num_guesses]):
            expected += reached * (1 - chance) * steps[start + count + 1]
            reached *= chance
        steps[start] = expected + reached * steps[start + num_guesses + 1]
    return steps[0]


class RejectionSampling:
    """The two models, as transformers computes them."""

    def __init__(self, model: Path, companion: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._models: list[Any] = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, companion)
        ]

    def accepted(self, one: Answered, temperature: float) -> list[float]:
        """[A] probability that a guess of each of the answer's tokens was accepted."""
        (own, other) = (self._log_probs(model, one, temperature) for model in self._models)
        chances: list[float] = (other - own).exp().clamp(max=1.0).tolist()
        return chances

    def mean_accepted_length(self, texts: Sequence[Answered], temperature: float, num_guesses: int) -> float:
        """Tokens per step; the first one of an answer comes with its prompt."""
        steps = tokens = 0.0
        for one in texts:
            steps += expected_steps(self.accepted(one, temperature)[1:], num_guesses)
            tokens += len(one.answer) - 1
        return tokens / steps

    @torch.no_grad()
    def _log_probs(self, model: Any, one: Answered, temperature: float) -> torch.Tensor:
        """[A] of the answer's tokens."""
        ids = torch.tensor([[*one.prompt, *one.answer]])
        logits = model(ids, use_cache=False).logits[0, len(one.prompt) - 1 : -1].double()
        found = torch.log_softmax(logits / temperature, dim=-1)
        return found.gather(1, ids[0, len(one.prompt) :, None])[:, 0]
