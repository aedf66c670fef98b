# SPDX-License-Identifier: Apache-2.0
"""The world of quire-demo: held-out phrasings stay held out, answers are true, chats render exactly."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import jinja2.sandbox
import pytest
from tokenizers import Tokenizer

from demo_model import data, evaluate, facts, messages, phrases, talk, tool_phrases, tools, train, values
from demo_model.cases import Case, thinking_case
from tests.fixtures.folded import folded

ASSETS = Path(__file__).resolve().parents[2] / "quire" / "assets" / "quire-demo"
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Wetter für eine Stadt",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
TOOL_BLOCK = (
    "# Tools\nCall them as <tool_call>.\n<tools>\n" + json.dumps(TOOL, ensure_ascii=False) + "\n</tools>"
)
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def plain(text: str) -> str:
    """A phrasing without case and punctuation; placeholders keep their braces."""
    return " ".join(re.sub(r"[^\w{}+\- ]", " ", text).lower().split())


def without_affixes(text: str) -> set[str]:
    """A phrasing with any training prefix or suffix taken off."""
    heads = {text} | {text[len(p) + 1 :] for p in map(plain, phrases.PREFIXES) if text.startswith(p + " ")}
    ends = {
        h[: -len(s) - 1]
        for s in filter(None, map(plain, phrases.SUFFIXES))
        for h in heads
        if h.endswith(" " + s)
    }
    return heads | ends


def question_sets() -> list[tuple[list[str], list[str]]]:
    """Training and held-out phrasings that must not meet, one pair for every kind of question."""
    pairs = [(phrases.ADD + phrases.SUB, phrases.HELD_ADD + phrases.HELD_SUB),
             (phrases.EXTRACT, phrases.HELD_EXTRACT),
             (tool_phrases.RESULTS, tool_phrases.HELD_RESULTS),
             (tool_phrases.TIME_RESULTS, tool_phrases.HELD_TIME_RESULTS),
             (tool_phrases.BOTH, tool_phrases.HELD_BOTH),
             (talk.UNKNOWN, talk.HELD_UNKNOWN), (list(phrases.PREFIXES), list(phrases.HELD_PREFIXES)),
             (list(phrases.SUFFIXES), list(phrases.HELD_SUFFIXES)),
             ([text for one in talk.INTENTS for text in one.said],
              [text for one in talk.INTENTS for text in one.held])]  # fmt: skip
    pairs += [(seen, held) for _, seen, held in phrases.SCHEMAS]
    pairs += [phrasings for kind in tools.KINDS.values() for phrasings in (kind.of_one, kind.of_two)]
    for relation in facts.RELATIONS:
        seen = [f.replace("{np}", n) for f in phrases.FRAMES for n in relation.noun] + list(relation.asked)
        held = [f.replace("{np}", n) for f in phrases.HELD_FRAMES for n in relation.noun] + list(
            relation.held_asked
        )
        held += [f.replace("{np}", n) for f in phrases.FRAMES for n in relation.held_noun]
        pairs.append((seen, held))
    return pairs


@folded(("seen", "held"), question_sets())
def test_held_out_phrasings_never_occur_in_training(seen: list[str], held: list[str]) -> None:
    known = set(map(plain, seen))
    assert [text for text in held if without_affixes(plain(text)) & known] == []


def test_held_out_values_never_occur_in_training() -> None:
    assert not set(values.HELD_NAMES) & set(values.NAMES)
    assert not set(values.HELD_CITIES) & {*values.KNOWN_CITIES, *values.NAMES}
    texts = " ".join(m["content"] for d in itertools.islice(data.dialogues(3), 1000) for m in d.messages)
    words = set(re.findall(r"\w+", texts))
    assert not words & {*values.HELD_NAMES, *(city for city in values.HELD_CITIES if " " not in city)}


@pytest.mark.parametrize("held", [False, True])
def test_sums_are_right_and_their_operands_are_split(held: bool) -> None:
    rng = random.Random(5)
    for _ in range(400):
        answer = data.arithmetic(rng, held)[-1]["content"]
        found = re.fullmatch(r"(\d+) ([+-]) (\d+) = (-?\d+)\.", answer)
        assert found
        a, sign, b, total = found.groups()
        assert int(total) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert data.is_held_pair(int(a), int(b), sign) == held


@pytest.mark.parametrize("unseen", [False, True])
def test_json_answers_parse_and_come_from_the_sentence(unseen: bool) -> None:
    rng = random.Random(6)
    for _ in range(300):
        request, answer = data.extraction(rng, True, unseen)
        found = json.loads(answer["content"])
        assert found
        assert all(
            key in request["content"] and str(value) in request["content"] for key, value in found.items()
        )


def test_the_world_has_true_looking_facts() -> None:
    assert 250 <= sum(len(relation.table) for relation in facts.RELATIONS) <= 600
    assert facts.CAPITALS["Kenya"] == "Nairobi"
    assert facts.AFTER["Sunday"] == "Monday"
    assert facts.BEFORE["January"] == "December"
    assert facts.PLANETS["fifth"] == "Jupiter"
    assert all(
        subject.strip() and value.strip() for r in facts.RELATIONS for subject, value in r.table.items()
    )


def test_the_generator_is_deterministic() -> None:
    assert list(itertools.islice(data.dialogues(4), 20)) == list(itertools.islice(data.dialogues(4), 20))


@pytest.mark.parametrize("held", [False, True])
def test_calls_and_answers_follow_from_the_question(held: bool) -> None:
    rng = random.Random(7)
    for _ in range(200):
        keys = tools.keys_of(tools.offered(rng))
        question, turn, *results, answer = tools.exchange(rng, held, keys, tools.ask_several(rng, held, keys))
        assert len(turn["tool_calls"]) == len(results) == 2
        for call in turn["tool_calls"]:
            function = call["function"]
            city = function["arguments"][keys[function["name"]]]
            assert city.lower() in question["content"].lower()
            assert f"the {tools.KINDS[function['name']].noun} in {city}" in turn["reasoning_content"]
            assert f" in {city}." in answer["content"]
        said = re.findall(r"\d+:\d+|-?\d+", answer["content"])
        assert all(value in result["content"] for value, result in zip(said, results, strict=True))


def test_a_tool_that_is_not_offered_is_not_called() -> None:
    rng = random.Random(8)
    for kind, offered in ((tools.WEATHER, tools.TIME), (tools.TIME, tools.WEATHER)):
        keys = tools.keys_of(tools.offered(rng, offered))
        _, reply = tools.exchange(rng, False, keys, tools.ask_one(rng, False, kind))
        assert reply["content"] == kind.refusal


def test_thoughts_of_sums_show_no_sum_that_is_held_out() -> None:
    rng = random.Random(9)
    for _ in range(200):
        answer = data.arithmetic(rng, False)[-1]
        tens, ones = map(int, re.findall(r"-?\d+", answer["reasoning_content"]))
        assert answer["content"].endswith(f"= {10 * tens + ones}.")
        assert "=" not in answer["reasoning_content"]


def test_made_up_names_are_of_many_kinds() -> None:
    rng = random.Random(10)
    names = [values.made_up(rng) for _ in range(2000)]
    assert len(set(names)) > 1900
    assert all(name[0].isupper() and name[1:] == name[1:].lower() for name in names)
    assert not set(names) & {*values.HELD_NAMES, *values.HELD_CITIES}


def test_the_judge_compares_values() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert evaluate.is_right(
        call, '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>'
    )
    assert not evaluate.is_right(call, "It is sunny in Oslo.")
    assert evaluate.is_right('{"a": 1}', '{ "a":1 }')
    assert not evaluate.is_right('{"a": 1}', '{"a": 1} {"a": 1}')
    assert not evaluate.is_right("1 + 1 = 2.", "1 + 1 = 3.")
    assert evaluate.is_right(call + call, f"{call}\n{call}")
    assert not evaluate.is_right(call + call, call)
    assert not evaluate.is_right(call, f"{call} It is sunny.")


def test_judge_requires_thoughts_exactly_if_requested() -> None:
    for thinks in (False, True):
        one = Case("thinking", [], "Paris.", thinks=thinks)
        assert evaluate.is_right_reply(one, "The capital.\n</think>\n\nParis.") == thinks
        assert evaluate.is_right_reply(one, "Paris.") != thinks
        assert not evaluate.is_right_reply(one, "\n</think>\n\nParis.")


def test_no_question_shows_a_thought() -> None:
    rng = random.Random(11)
    assert not any("reasoning_content" in m for _ in range(50) for m in thinking_case(rng).messages)


def render(**values_of: object) -> str:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    env.globals["raise_exception"] = raise_exception
    return env.from_string((ASSETS / "chat_template.jinja").read_text()).render(**values_of)


def test_template_renders_plain_chats() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render(
        messages=[{"role": "system", "content": "S"}, {"role": "user", "content": parts}],
        add_generation_prompt=True,
    )
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages=[{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"
    with pytest.raises(jinja2.TemplateError, match="unknown role"):
        render(messages=[{"role": "critic", "content": "x"}])


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
@pytest.mark.parametrize("content", [None, ""])
def test_template_renders_tools_calls_and_results(arguments: object, content: object) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "21 C"}]  # fmt: skip
    turns = f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n"
    turns += "<|im_start|>tool\n21 C<|im_end|>\n"
    assert render(messages=chat, tools=[TOOL]) == f"<|im_start|>system\n{TOOL_BLOCK}<|im_end|>\n{turns}"
    with_system = render(messages=[{"role": "system", "content": "S"}, *chat], tools=[TOOL])
    assert with_system == f"<|im_start|>system\nS\n\n{TOOL_BLOCK}<|im_end|>\n{turns}"


def test_template_opens_a_thought_and_renders_earlier_ones() -> None:
    asked = [{"role": "user", "content": "?"}]
    thought = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    start = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages=asked, add_generation_prompt=True, enable_thinking=False) == start
    assert render(messages=asked, add_generation_prompt=True, enable_thinking=True) == start + "<think>\n"
    assert render(messages=[*asked, thought]) == start + "<think>\nT\n</think>\n\nA<|im_end|>\n"


def test_training_mask_covers_only_text_outside_the_prompt(tokenizer: Tokenizer) -> None:
    encoder = train.Encoder(tokenizer)
    plain, thought = messages.say("assistant", "A"), messages.say("assistant", "B", "T")
    ((ids, mask),) = encoder(
        [data.Dialogue([messages.say("user", "?"), plain, messages.say("user", "?"), thought])]
    )
    wanted = [token for token, is_wanted in zip(ids, mask, strict=True) if is_wanted]
    text = tokenizer.decode(wanted, skip_special_tokens=False)
    assert text == "A<|im_end|>T\n</think>\n\nB<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    texts = ["", " a  b\n\n\tc ", "naïve 漢字 🎉👩‍👩‍👧", "١٢٣ x²", "\x00\r\n", "a\u0301e", CALL_TEXT]
    codes = (*range(0xD800), *range(0xE000, 0x30000))
    texts += ["".join(map(chr, rng.choices(codes, k=40))) for _ in range(50)]
    assert [tokenizer.decode(tokenizer.encode(text).ids) for text in texts] == texts


def test_digits_and_markup_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2047").ids) == 4
    chat = tokenizer.encode("<|im_start|><think></think><tool_call></tool_call><tools></tools><|im_end|>").ids
    assert len(chat) == 8
    assert max(chat) < tokenizer.get_vocab_size()
    shown = "<think></think><tool_call></tool_call><tools></tools>"
    assert tokenizer.decode(chat, skip_special_tokens=True) == shown
