"""How many tokens of quire-demo a guess of quire-demo-draft gives: `python -m demo_model.evaluate_companion`.

The mean accepted length is tokens per step in which guesses are verified: those accepted, and the one behind them. The
questions are those that quire-demo is judged by. Exits with 1 below 2.5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from demo_model.cases import Case, cases
from quire import LLM, SamplingParams
from quire.config.model import DEMO_COMPANION, DEMO_MODEL

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
    """Of the answers to some questions."""
    groups: dict[str, list[Case]] = {}
    for one in found:
        groups.setdefault(repr((one.tools, one.thinks)), []).append(one)
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=MAX_TOKENS)
    num_steps = num_accepted = 0
    for group in groups.values():
        first, chats = group[0], [one.messages for one in group]
        options = {"enable_thinking": first.thinks}
        before = stats(llm)
        llm.chat(chats, params, tools=first.tools, chat_template_kwargs=options, use_tqdm=False)
        after = stats(llm)
        num_steps += after[0] - before[0]
        num_accepted += after[1] - before[1]
    return 1 + num_accepted / num_steps


def stats(llm: LLM) -> tuple[int, int]:
    """How often guesses were verified, and how many were accepted, since the start."""
    found = llm.llm_engine.call_core("stats").get("spec_decoding") or {}
    return found.get("num_drafts", 0), found.get("num_accepted_tokens", 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=0, help="at most so many questions of a kind")
    parser.add_argument("--num-tokens", type=int, default=8, help="guessed at a time")
    parser.add_argument("--model", default=DEMO_COMPANION)
    args = parser.parse_args()
    llm, found, lengths = with_companion(args.num_tokens, args.model), cases(SEED, args.limit), list[float]()
    for temperature in (0.0, 0.7, 1.0):
        lengths.append(mean_accepted_length(llm, found, temperature))
        print(f"temperature {temperature}: mean accepted length {lengths[-1]:.2f}", flush=True)
    return int(min(lengths) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
