# SPDX-License-Identifier: Apache-2.0
"""Ask quire-demo what it was never asked in training and count right answers per category.

Greedy replies, by quire or by the reference implementation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo_model import talk
from demo_model.cases import Case, cases
from demo_model.tokenizer import END_THINK

ASSETS = Path(__file__).resolve().parent.parent / "quire" / "assets" / "quire-demo"
PASS_PERCENT, MAX_TOKENS = 95.0, 128
OVERALL, BEYOND = "overall", ("json, unseen names", "tool, unseen cities")
"""Rows of names that training never saw measure copying, not the model's world; they do not count as overall."""
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


Answerer = Callable[[list[Case]], list[str]]


def parse(text: str) -> Any:
    """The JSON value of a text, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def calls_in(text: str) -> list[Any] | None:
    """The calls that a text consists of, or None if there is anything else."""
    return None if TOOL_CALL.sub("", text).strip() else [parse(call) for call in TOOL_CALL.findall(text)]


def is_right(expected: str, text: str) -> bool:
    """Same reply; JSON and calls are compared as values, and any joke is a joke."""
    text = text.strip()
    if expected.startswith("<tool_call>"):
        return calls_in(text) == calls_in(expected)
    if expected.startswith("{"):
        return bool(parse(text) == parse(expected))
    group = next((one.replies for one in talk.INTENTS if expected in one.replies), (expected,))
    return text in group


def is_right_reply(one: Case, text: str) -> bool:
    """Right, and thought about first if that is wanted, never otherwise."""
    if not one.thinks:
        return is_right(one.expected, text)
    thought, end, answer = text.partition(END_THINK)
    return bool(thought.strip() and end) and is_right(one.expected, answer)


def answer_with_quire(model: str) -> Answerer:
    """Greedy replies of the engine this model ships with."""
    from quire import LLM, SamplingParams

    llm, params = LLM(model=model), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def answer(found: list[Case]) -> list[str]:
        replies = [""] * len(found)
        # One call takes one set of tools, so the chats without any go together and the others one by one.
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, one in enumerate(found):
            groups.setdefault((i if one.tools else -1, one.thinks), []).append(i)
        for group in groups.values():
            first, chats = found[group[0]], [found[i].messages for i in group]
            options = {"enable_thinking": first.thinks}
            outputs = llm.chat(chats, params, tools=first.tools, chat_template_kwargs=options, use_tqdm=False)
            for i, output in zip(group, outputs, strict=True):
                replies[i] = output.outputs[0].text
        return replies

    return answer


def answer_with_transformers(model: str) -> Answerer:
    """Greedy replies of the reference implementation, in padded batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = {"do_sample": False, "temperature": None, "top_p": None, "max_new_tokens": MAX_TOKENS}

    def batch(prompts: list[str]) -> list[str]:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        grown = network.generate(input_ids=ids, attention_mask=mask, **options)
        return list(tokenizer.batch_decode(grown[:, ids.shape[1] :], skip_special_tokens=True))

    def prompt(one: Case) -> str:
        return str(tokenizer.apply_chat_template(one.messages, one.tools, tokenize=False, add_generation_prompt=True,
                                                 enable_thinking=one.thinks))  # fmt: skip

    def answer(found: list[Case]) -> list[str]:
        prompts = [prompt(one) for one in found]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        replies = [""] * len(prompts)
        for at in range(0, len(order), 64):
            group = order[at : at + 64]
            for i, text in zip(group, batch([prompts[i] for i in group]), strict=True):
                replies[i] = text
        return replies

    return answer


def report(found: list[Case], replies: list[str]) -> dict[str, dict[str, float]]:
    """Count, right answers and percent per category, then of its whole world, then of what lies beyond."""
    table: dict[str, dict[str, float]] = {}
    for one, reply in zip(found, replies, strict=True):
        for name in (one.category,) if one.category in BEYOND else (one.category, OVERALL):
            row = table.setdefault(name, {"count": 0, "right": 0})
            row["count"] += 1
            row["right"] += is_right_reply(one, reply)
    for row in table.values():
        row["percent"] = round(100 * row["right"] / row["count"], 1)
    for name in (OVERALL, *BEYOND):
        table[name] = table.pop(name)
    return table


def show(table: dict[str, dict[str, float]]) -> None:
    print(f"{'category':22} {'count':>6} {'right':>6} {'percent':>8}")
    for name, row in table.items():
        print(f"{name:22} {row['count']:6.0f} {row['right']:6.0f} {row['percent']:8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS))
    parser.add_argument("--backend", choices=("quire", "transformers"), default="quire")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--limit", type=int, default=0, help="at most so many cases per category")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong replies per category")
    args = parser.parse_args()
    found = cases(args.seed, args.limit)
    answerer = (
        answer_with_quire(args.model) if args.backend == "quire" else answer_with_transformers(args.model)
    )
    replies = answerer(found)
    table = report(found, replies)
    show(table)
    show_wrong(found, replies, args.wrong)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")
    return int(table[OVERALL]["percent"] < PASS_PERCENT)


def show_wrong(found: list[Case], replies: list[str], count: int) -> None:
    left: dict[str, int] = {}
    for one, reply in zip(found, replies, strict=True):
        if not is_right_reply(one, reply) and left.setdefault(one.category, count) > 0:
            left[one.category] -= 1
            print(f"[{one.category}] {one.messages[-1]['content']!r}")
            print(f"  wanted {one.expected!r}\n  got    {reply!r}")


if __name__ == "__main__":
    sys.exit(main())
