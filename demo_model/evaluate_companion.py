# SPDX-License-Identifier: Apache-2.0
"""Mean accepted length of quire-demo-draft's drafts for quire-demo: `python -m demo_model.evaluate_companion`.

The mean accepted length is tokens per step in which guesses are verified: those accepted, and the one behind them. The
questions are those that quire-demo is judged by. `--rejection` says what it would be by rejection sampling, of the same
answers. Exits with 1 below 2.5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from demo_model.cases import Case, cases
from demo_model.rejection import Answered, RejectionSampling
from quire import LLM, SamplingParams
from quire.config.model import DEMO_COMPANION, DEMO_MODEL
from quire.models.checkpoint import resolve_model_dir

GOAL, SEED, MAX_TOKENS = 2.5, 11, 128


def with_companion(num_tokens: int, model: str = DEMO_COMPANION) -> LLM:
    """quire-demo, for which its companion always guesses so many tokens."""
    given = {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": num_tokens,
        "adaptive": False,
    }
    return LLM(DEMO_MODEL, speculative_config=given)


def mean_accepted_length(llm: LLM, found: Sequence[Case], temperature: float) -> float:
    """Return the mean accepted length over the answers to some questions."""
    return answered(llm, found, temperature)[0]


def answered(llm: LLM, found: Sequence[Case], temperature: float) -> tuple[float, list[Answered]]:
    """The mean accepted length of the answers to some questions, and these."""
    groups: dict[str, list[Case]] = {}
    for one in found:
        groups.setdefault(repr((one.tools, one.thinks)), []).append(one)
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=MAX_TOKENS)
    num_steps, num_accepted, answers = 0, 0, list[Answered]()
    for group in groups.values():
        first, chats = group[0], [one.messages for one in group]
        options = {"enable_thinking": first.thinks}
        before = stats(llm)
        outputs = llm.chat(chats, params, tools=first.tools, chat_template_kwargs=options, use_tqdm=False)
        answers += [Answered(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]
        after = stats(llm)
        num_steps += after[0] - before[0]
        num_accepted += after[1] - before[1]
    return 1 + num_accepted / num_steps, answers


def stats(llm: LLM) -> tuple[int, int]:
    """Return the number of verified drafts and of accepted tokens since the start."""
    found = llm.llm_engine.call_core("stats").get("spec_decoding") or {}
    return found.get("num_drafts", 0), found.get("num_accepted_tokens", 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=0, help="at most so many questions of a kind")
    parser.add_argument("--num-tokens", type=int, default=8, help="guessed at a time")
    parser.add_argument("--model", default=DEMO_COMPANION)
    parser.add_argument("--rejection", action="store_true", help="beside rejection sampling, by transformers")
    args = parser.parse_args()
    llm, found, lengths = with_companion(args.num_tokens, args.model), cases(SEED, args.limit), list[float]()
    rejection = None
    if args.rejection:
        rejection = RejectionSampling(
            *(resolve_model_dir(name, None, None) for name in (DEMO_MODEL, args.model))
        )
    for temperature in (0.0, 0.7, 1.0):
        length, answers = answered(llm, found, temperature)
        lengths.append(length)
        print(f"temperature {temperature}: mean accepted length {length:.2f}", flush=True)
        if rejection is not None and temperature:
            length = rejection.mean_accepted_length(answers, temperature, args.num_tokens)
            print(f"  by rejection sampling {length:.2f}", flush=True)
    return int(min(lengths) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
