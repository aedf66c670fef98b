"""Ask quire-demo what it was never asked in training and count right answers per category.

Invariant: every case uses held-out phrasings; operand pairs and "unseen" names are held out too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_model import data, facts, phrases, talk
from demo_model.data import Message

ASSETS = Path(__file__).resolve().parent.parent / "quire" / "assets" / "quire-demo"
PASS_PERCENT, MAX_TOKENS = 95.0, 80
Tools = list[dict[str, Any]] | None
OVERALL, BEYOND = "overall", ("json, unseen names", "tool, unseen cities")
"""Rows of names that training never saw measure copying, not the model's world; they do not count as overall."""
Answerer = Callable[[list[list[Message]], list[Tools]], list[str]]
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A conversation whose next reply is judged."""

    category: str
    messages: list[Message]
    expected: str
    tools: Tools = None


def system(rng: random.Random) -> list[Message]:
    """Half of the cases have a system prompt, often one never seen."""
    prompts = (*phrases.HELD_SYSTEM_PROMPTS, "You are a helpful assistant.")
    return [data.say("system", rng.choice(prompts))] if rng.random() < 0.5 else []


def case(
    category: str, messages: list[Message], tools: Tools = None, head: list[Message] | None = None
) -> Case:
    """Cut the last reply off; a tool call is expected in its rendered form."""
    last = messages[-1]
    return Case(category, (head or []) + messages[:-1], last["content"] or call_text(last), tools)


def call_text(message: Message) -> str:
    return (
        "<tool_call>" + json.dumps(message["tool_calls"][0]["function"], ensure_ascii=False) + "</tool_call>"
    )


def fact_cases(rng: random.Random) -> list[Case]:
    """Every fact once, in a held-out phrasing."""
    return [case("facts", data.fact_turn(rng, True, relation, subject), head=system(rng))
            for relation in facts.RELATIONS for subject in relation.table]  # fmt: skip


def tool_cases(rng: random.Random, unseen: bool) -> list[Case]:
    """A call and the answer to its result."""
    tools = data.offered_tools(rng)
    messages, head = data.weather(rng, True, data.city_key(tools), unseen), system(rng)
    name = "tool, unseen cities" if unseen else "tool call"
    cases = [case(name, messages[:2], tools, head)]
    return cases if unseen else [*cases, case("tool answer", messages, tools, head)]


def no_call_case(rng: random.Random, index: int) -> Case:
    """No weather tool: say so.  A tool, but another question: just answer."""
    if index % 2:
        tools = [data.other_tool(rng)] if rng.random() < 0.3 else None
        return case("tool not offered", data.weather(rng, True, None), tools, system(rng))
    messages = data.exchange(rng, True, rng.choice(("facts", "arithmetic", "json", "talk")), None)
    return case("tool not needed", messages, data.offered_tools(rng), system(rng))


def chat_case(rng: random.Random) -> Case:
    """The last turn of a dialogue of two to five exchanges that mixes everything."""
    tools = data.offered_tools(rng) if rng.random() < 0.4 else None
    chosen = rng.choices(data.CATEGORIES, data.WEIGHTS, k=rng.randrange(2, 6))
    messages = system(rng)
    for category in chosen:
        messages += data.exchange(rng, True, category, data.city_key(tools))
    return case("dialogue", messages, tools)


def cases(seed: int, limit: int) -> list[Case]:
    """The whole evaluation; `limit` caps each category (0: no cap)."""
    rng = random.Random(seed)
    found = fact_cases(rng)
    found += [case("arithmetic", data.arithmetic(rng, True), head=system(rng)) for _ in range(400)]
    found += [case("json", data.extraction(rng, True), head=system(rng)) for _ in range(200)]
    found += [
        case("json, unseen names", data.extraction(rng, True, True), head=system(rng)) for _ in range(100)
    ]
    for _ in range(100):
        found += tool_cases(rng, False) + tool_cases(rng, True)
    found += [no_call_case(rng, index) for index in range(200)]
    found += [case("small talk", data.small_talk(rng, True), head=system(rng)) for _ in range(200)]
    found += [chat_case(rng) for _ in range(200)]
    return [
        one
        for group in by_category(found).values()
        for one in (rng.sample(group, min(limit, len(group))) if limit else group)
    ]


def by_category(found: list[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for one in found:
        groups.setdefault(one.category, []).append(one)
    return groups


def parse(text: str) -> Any:
    """The JSON value of a text, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_right(expected: str, text: str) -> bool:
    """Same reply; JSON and calls are compared as values, and any joke is a joke."""
    text = text.strip()
    if expected.startswith("<tool_call>"):
        found = TOOL_CALL.fullmatch(text)
        return found is not None and bool(parse(found[1]) == parse(expected[11:-12]))
    if expected.startswith("{"):
        return bool(parse(text) == parse(expected))
    group = next((one.replies for one in talk.INTENTS if expected in one.replies), (expected,))
    return text in group


def answer_with_quire(model: str) -> Answerer:
    """Greedy replies of the engine this model ships with."""
    from quire import LLM, SamplingParams

    llm, params = LLM(model=model), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def answer(chats: list[list[Message]], tools: list[Tools]) -> list[str]:
        replies = [""] * len(chats)
        # One call takes one set of tools, so the chats without any go together and the others one by one.
        plain = [i for i, offered in enumerate(tools) if not offered]
        groups = [plain] * bool(plain) + [[i] for i, offered in enumerate(tools) if offered]
        for group in groups:
            outputs = llm.chat([chats[i] for i in group], params, tools=tools[group[0]], use_tqdm=False)
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

    def answer(chats: list[list[Message]], tools: list[Tools]) -> list[str]:
        prompts = [tokenizer.apply_chat_template(chat, offered, tokenize=False, add_generation_prompt=True)
                   for chat, offered in zip(chats, tools, strict=True)]  # fmt: skip
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
            row["right"] += is_right(one.expected, reply)
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
    replies = answerer([one.messages for one in found], [one.tools for one in found])
    table = report(found, replies)
    show(table)
    show_wrong(found, replies, args.wrong)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")
    return int(table[OVERALL]["percent"] < PASS_PERCENT)


def show_wrong(found: list[Case], replies: list[str], count: int) -> None:
    left: dict[str, int] = {}
    for one, reply in zip(found, replies, strict=True):
        if not is_right(one.expected, reply) and left.setdefault(one.category, count) > 0:
            left[one.category] -= 1
            print(f"[{one.category}] {one.messages[-1]['content']!r}")
            print(f"  wanted {one.expected!r}\n  got    {reply!r}")


if __name__ == "__main__":
    sys.exit(main())
