# SPDX-License-Identifier: Apache-2.0
"""Answers as models of each format write them, well-formed and not, and what is to be read of them."""

# ruff: noqa: E501  (an answer stands here as its model writes it)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.reasoning import FORMATS as REASONING_FORMATS
from quire.entrypoints.chat.formats.tools import FORMATS
from tests.entrypoints.chat.formats.reading import Calls

WEATHER: Calls = [("get_weather", {"city": "Paris"})]
TWO: Calls = [("get_weather", {"city": "Rome", "days": 2}), ("now", {})]
ROWS = {name: row for row in FORMATS for name in (row.name, *row.aliases)}
REASONING = {row.name: row for row in REASONING_FORMATS}
JSON_OF_WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@dataclass(frozen=True)
class Transcript:
    """One answer; `reasoning` names the format of what is thought in it."""

    format: str
    what: str
    text: str
    content: str = ""
    calls: Calls = field(default_factory=list)
    thought: str = ""
    reasoning: str | None = None
    prompt: str = ""

    @property
    def row(self) -> ToolFormat:
        return ROWS[self.format]


def lost(format_name: str, what: str, text: str) -> Transcript:
    """Return a transcript that is no call, so its text is content as it was written."""
    return Transcript(format_name, what, text, content=text)


WRITTEN: tuple[Transcript, ...] = (
    # --- hermes: Qwen 2.5, Qwen 3, Hermes, SmolLM 3, Granite 4
    Transcript("hermes", "compact", f"<tool_call>{JSON_OF_WEATHER}</tool_call>", calls=WEATHER),
    Transcript("hermes", "no close", f"<tool_call>\n{JSON_OF_WEATHER}\n", calls=WEATHER),
    Transcript(
        "hermes", "no close between", f"<tool_call>\n{JSON_OF_WEATHER}\n<tool_call>\n{{\"name\": \"now\"}}\n</tool_call>",
        calls=[*WEATHER, ("now", {})],
    ),
    Transcript(
        "hermes", "no close, then text", f"<tool_call>\n{JSON_OF_WEATHER}\nI wait.", content="\nI wait.", calls=WEATHER
    ),
    Transcript(
        "hermes", "two in one section", f"<tool_call>\n{JSON_OF_WEATHER}\n{JSON_OF_WEATHER}\n</tool_call>",
        calls=WEATHER * 2,
    ),
    Transcript(
        "hermes", "parameters", '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>',
        calls=WEATHER,
    ),
    Transcript(
        "hermes", "arguments in a string",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', calls=WEATHER,
    ),
    Transcript(
        "hermes", "as in the API",
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{}"}}</tool_call>',
        calls=[("now", {})],
    ),
    Transcript(
        "hermes", "only a name", '<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]
    ),
    Transcript(
        "hermes", "null arguments", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[("now", {})]
    ),
    Transcript(
        "hermes", "duplicate keys", '<tool_call>{"name": "get_weather", "arguments": {"days": 1, "days": 2}}</tool_call>',
        calls=[("get_weather", {"days": 2})],
    ),
    Transcript(
        "hermes", "a number beyond floats", '<tool_call>{"name": "get_weather", "arguments": {"limit": 1e400}}</tool_call>',
        calls=[("get_weather", {"limit": float("inf")})],
    ),
    Transcript(
        "hermes", "unknown tool", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', calls=[("rm", {})]
    ),
    Transcript(
        "hermes", "in a code fence", f"```xml\n<tool_call>{JSON_OF_WEATHER}</tool_call>\n```", content="```xml\n```",
        calls=WEATHER,
    ),
    Transcript(
        "hermes", "wrong, then right", f"<tool_call>{{oops}}</tool_call>\n<tool_call>{JSON_OF_WEATHER}</tool_call>",
        content="<tool_call>{oops}</tool_call>", calls=WEATHER,
    ),
    Transcript(
        "hermes", "doubled marker", f"<tool_call><tool_call>{JSON_OF_WEATHER}</tool_call>", content="<tool_call>",
        calls=WEATHER,
    ),
    Transcript(
        "hermes", "the marker is spoken of", f"I write <tool_call> now. <tool_call>{JSON_OF_WEATHER}</tool_call>",
        content="I write <tool_call> now.", calls=WEATHER,
    ),
    Transcript(
        "hermes", "thought of", f"<think>A <tool_call>{JSON_OF_WEATHER}</tool_call>?</think>\n\nNo.",
        content="No.", thought=f"A <tool_call>{JSON_OF_WEATHER}</tool_call>?", reasoning="qwen3",
    ),
    lost("hermes", "a fence in the section", f"<tool_call>\n```json\n{JSON_OF_WEATHER}\n```\n</tool_call>"),
    Transcript(
        "hermes", "a bracket too many", f"<tool_call>\n{JSON_OF_WEATHER}}}\n</tool_call>", content="}\n</tool_call>", calls=WEATHER
    ),
    lost("hermes", "Python in JSON", '<tool_call>{"name": "get_weather", "arguments": {"exact": True}}</tool_call>'),
    lost("hermes", "None in JSON", '<tool_call>{"name": "get_weather", "arguments": {"limit": None}}</tool_call>'),
    lost("hermes", "trailing comma", '<tool_call>{"name": "get_weather", "arguments": {"days": 1,}}</tool_call>'),
    lost("hermes", "single quotes", "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"),
    lost("hermes", "no name", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    lost("hermes", "empty name", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    lost("hermes", "name is a number", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    lost("hermes", "arguments are a list", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    lost("hermes", "arguments are words", '<tool_call>{"name": "now", "arguments": "all"}</tool_call>'),
    lost("hermes", "open string", '<tool_call>{"name": "now", "arguments": {"a": "b}}</tool_call> and more'),
    lost("hermes", "a bracket too few", '<tool_call>{"name": "now", "arguments": {}</tool_call>'),
    lost("hermes", "wrong nesting", '<tool_call>{"name": "now", "arguments": [}]}</tool_call>'),
    lost("hermes", "close before open", "</tool_call> {} "),
    lost("hermes", "nothing in it", "<tool_call></tool_call>"),
    # --- Llama 3
    Transcript(
        "llama3_json", "tagged", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=WEATHER
    ),
    Transcript(
        "llama3_json", "typed", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=WEATHER,
    ),
    Transcript(
        "llama3_json", "several with semicolons",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}};'
        '{"name": "now", "parameters": {}}',
        calls=[*WEATHER, ("now", {}), ("now", {})],
    ),
    Transcript(
        "llama3_json", "strings for numbers", '{"name": "get_weather", "parameters": {"days": "2"}}',
        calls=[("get_weather", {"days": "2"})],
    ),
    lost("llama3_json", "unknown tool", '{"name": "paris", "parameters": {}}'),
    lost("llama3_json", "JSON that is an answer", '{"city": "Paris", "days": [1, 2]}'),
    lost("llama3_json", "built-in tool", '<|python_tag|>brave_search.call(query="x")'),
    lost("llama3_json", "code", "<|python_tag|>import os\nprint({})"),
    # --- pythonic: Llama 3.2, Llama 4, LFM 2, OLMo 3
    Transcript(
        "pythonic", "both kinds of literals", "[get_weather(exact=True, limit=None), get_weather(exact=true, limit=null)]",
        calls=[("get_weather", {"exact": True, "limit": None})] * 2,
    ),
    Transcript("pythonic", "a pattern", r"[get_weather(city='\d+ \\ \'')]", calls=[("get_weather", {"city": "\\d+ \\ '"})]),
    Transcript(
        "pythonic", "lists and dicts", "[get_weather(where={'a': [1, -2.5, {'b': ()}]}, tags=['x'])]",
        calls=[("get_weather", {"where": {"a": [1, -2.5, {"b": []}]}, "tags": ["x"]})],
    ),
    lost("pythonic", "a list", "[1, 2, 3]"),
    lost("pythonic", "a link", "[see](https://now)"),
    lost("pythonic", "unknown tool", "[rm(path='/')]"),
    lost("pythonic", "no literal", "[get_weather(city=open('x').read())]"),
    lost("pythonic", "positional", "[get_weather('Paris')]"),
    lost("pythonic", "infinite", "[get_weather(limit=1e400)]"),
    lost("pythonic", "half a character", r"[get_weather(city='\ud800')]"),
    lost("pythonic", "open bracket", "[get_weather(city='Paris'"),
    Transcript(
        "llama4_pythonic", "bare", "[get_weather(city='Paris')]", calls=WEATHER
    ),
    Transcript(
        "llama4_pythonic", "no close", "<|python_start|>[get_weather(city='Paris')]", calls=WEATHER
    ),
    Transcript(
        "lfm2", "text around", "Let me look.<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>Looking.",
        content="Let me look.Looking.", calls=WEATHER,
    ),
    Transcript(
        "olmo3", "one line", "<function_calls>get_weather(city='Paris')</function_calls>", calls=WEATHER
    ),
    # --- Mistral
    Transcript(
        "mistral", "with ids", '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "Paris"}', calls=WEATHER
    ),
    Transcript("mistral", "no args marker", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls=WEATHER),
    Transcript("mistral", "spaced", "[TOOL_CALLS] now [ARGS] {}", calls=[("now", {})]),
    Transcript("mistral", "doubled marker", "[TOOL_CALLS][TOOL_CALLS]now[ARGS]{}", calls=[("now", {})]),
    Transcript(
        "mistral", "the old way", f"[TOOL_CALLS] [{JSON_OF_WEATHER}, {JSON_OF_WEATHER}]", calls=WEATHER * 2
    ),
    Transcript(
        "mistral", "thought of", "[THINK]Now [TOOL_CALLS]?[/THINK][TOOL_CALLS]now[ARGS]{}", calls=[("now", {})],
        thought="Now [TOOL_CALLS]?", reasoning="mistral",
    ),
    lost("mistral", "no object", "[TOOL_CALLS]get_weather[ARGS]Paris"),
    lost("mistral", "no name", '[TOOL_CALLS][ARGS]{"city": "Paris"}'),
    lost("mistral", "prose", "I would write [TOOL_CALLS] here, and go on."),
    Transcript(
        "mistral_v3", "compact, with ids",
        '[TOOL_CALLS][{"name":"get_weather","arguments":{"city":"Paris"},"id":"abcdef123"}]', calls=WEATHER,
    ),
    Transcript("mistral_v3", "the new way", "[TOOL_CALLS]now[ARGS]{}", calls=[("now", {})]),
    # --- DeepSeek
    Transcript(
        "deepseek_v3", "no line ends",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather```json{"city": "Paris"}```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=WEATHER,
    ),
    Transcript(
        "deepseek_v3", "no section",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
        calls=WEATHER,
    ),
    Transcript(
        "deepseek_v3", "after reasoning",
        'I need it.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=[("now", {})], thought="I need it.", reasoning="deepseek_r1", prompt="<｜Assistant｜>",
    ),
    Transcript(
        "deepseek_v31", "with line ends",
        '<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>get_weather\n<｜tool▁sep｜>\n{"city": "Paris"}\n<｜tool▁call▁end｜>\n'
        "<｜tool▁calls▁end｜>",
        calls=WEATHER,
    ),
    Transcript(
        "deepseek_v31", "no ends", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}',
        calls=WEATHER,
    ),
    lost("deepseek_v31", "no object", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁calls▁end｜>"),
    # --- Kimi
    Transcript(
        "kimi_k2", "numbered",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        calls=[*WEATHER, ("now", {})],
    ),
    Transcript(
        "kimi_k2", "bare names, no section",
        '<|tool_call_begin|>get_weather<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>', calls=WEATHER,
    ),
    Transcript(
        "kimi_k2", "reasoning speaks of the section",
        "<think>With <|tool_calls_section_begin|> I could.</think>No.", content="No.",
        thought="With <|tool_calls_section_begin|> I could.", reasoning="kimi_k2",
    ),
    lost("kimi_k2", "no name", "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}"),
    # --- GLM
    Transcript(
        "glm47", "no line ends",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        calls=[("get_weather", {"city": "Paris", "days": 2})],
    ),
    Transcript(
        "glm45", "reasoning speaks of the marker", "<think>I'd use <tool_call>now if asked.</think>\n<tool_call>now\n</tool_call>",
        calls=[("now", {})], thought="I'd use <tool_call>now if asked.", reasoning="glm45",
    ),
    Transcript(
        "glm45", "reasoning is not ended",
        "<think>I look.\n<tool_call>now\n</tool_call>", calls=[("now", {})], thought="I look.", reasoning="glm45",
    ),
    Transcript(
        "glm45", "prose, then a call", "<tool_call>is how I begin. <tool_call>now</tool_call>",
        content="<tool_call>is how I begin.", calls=[("now", {})],
    ),
    lost("glm45", "JSON", '<tool_call>{"name": "now"}</tool_call>'),
    lost("glm45", "value without a key", "<tool_call>get_weather<arg_value>Paris</arg_value></tool_call>"),
    # --- Qwen 3 Coder
    Transcript(
        "qwen3_coder", "no section", "I look.\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        content="I look.", calls=WEATHER,
    ),
    Transcript(
        "qwen3_coder", "one line", "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        calls=WEATHER,
    ),
    Transcript("qwen3_coder", "as Hermes", f"<tool_call>\n{JSON_OF_WEATHER}\n</tool_call>", calls=WEATHER),
    Transcript(
        "qwen3_coder", "code in a value",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n    </p>\n\n</parameter>\n</function>\n</tool_call>",
        calls=[("get_weather", {"city": "if a < b:\n    </p>\n"})],
    ),
    Transcript(
        "qwen3_coder", "types by the schema",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=limit>\nNone\n</parameter>\n</function>\n</tool_call>",
        calls=[("get_weather", {"city": "5", "days": 5, "exact": True, "limit": None})],
    ),
    Transcript(
        "qwen3_coder", "no end of the function",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        calls=[*WEATHER, ("now", {})],
    ),
    lost("qwen3_coder", "no end of the value", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>"),
    lost("qwen3_coder", "no end of a function without values", "<tool_call>\n<function=now>\n</tool_call>"),
    lost("qwen3_coder", "no name", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    lost("qwen3_coder", "prose", "Use <function=f for that, and <function=g> too. So it is."),
    # --- other tags
    Transcript(
        "seed_oss", "reasoning before",
        "<seed:think>So.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        calls=WEATHER, thought="So.", reasoning="seed_oss",
    ),
    Transcript(
        "minimax_m2", "several invokes",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        calls=[*WEATHER, ("now", {})],
    ),
    Transcript(
        "minimax_m2", "typed values",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="tags">["a", 1]</parameter>\n'
        '<parameter name="where">{"b": null}</parameter>\n</invoke>\n</minimax:tool_call>',
        calls=[("get_weather", {"tags": ["a", 1], "where": {"b": None}})],
    ),
    # --- Gemma
    Transcript(
        "functiongemma", "lists and objects",
        "<start_function_call>call:get_weather{where:{at:[1,<escape>a:{b<escape>,{c:true}]},tags:[<escape>x<escape>]}"
        "<end_function_call>",
        calls=[("get_weather", {"where": {"at": [1, "a:{b", {"c": True}]}, "tags": ["x"]})],
    ),
    Transcript(
        "functiongemma", "a response begins", "<start_function_call>call:now{}<end_function_call><start_function_response>",
        content="<start_function_response>", calls=[("now", {})],
    ),
    lost("functiongemma", "open quote", "<start_function_call>call:get_weather{city:<escape>Paris}<end_function_call>"),
    lost("functiongemma", "bare string", "<start_function_call>call:get_weather{city:Paris}<end_function_call>"),
    Transcript(
        "functiongemma", "odd keys", "<start_function_call>call:get_weather{where:{$a/b:1,xml:lang:<escape>x:y<escape>,a b:{c-d:[2]}}}"
        "<end_function_call>",
        calls=[("get_weather", {"where": {"$a/b": 1, "xml:lang": "x:y", "a b": {"c-d": [2]}}})],
    ),
    Transcript(
        "gemma4", "after reasoning",
        '<|channel>thought\nI look.\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        calls=WEATHER, thought="I look.", reasoning="gemma4",
    ),
    Transcript(
        "gemma4", "empty reasoning in the prompt", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        calls=WEATHER, reasoning="gemma4", prompt="<|turn>model\n<|channel>thought\n<channel|>",
    ),
    Transcript(
        "gemma4", "an answer after reasoning", "<|channel>thought\nI know.<channel|>It rains.", content="It rains.",
        thought="I know.", reasoning="gemma4",
    ),
    Transcript(
        "gemma4", "reasoning is not ended", "<|channel>thought\nI look.\n<|tool_call>call:now{}<tool_call|>", calls=[("now", {})],
        thought="I look.", reasoning="gemma4",
    ),
    Transcript(
        "gemma4", "spaces and Python's words",
        '<|tool_call>call:get_weather{ city: <|"|>Paris<|"|>, limit: None, exact: True, tags: [None, <|"|>True<|"|>] }<tool_call|>',
        calls=[("get_weather", {"city": "Paris", "limit": None, "exact": True, "tags": [None, "True"]})],
    ),
    Transcript(
        "gemma4", "quoted keys", '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>Paris<|"|>}<tool_call|>', calls=WEATHER
    ),
    Transcript(
        "gemma4", "markup in a string", '<|tool_call>call:get_weather{city:<|"|>}<tool_call|>{a:1,<|"|>}<tool_call|>',
        calls=[("get_weather", {"city": "}<tool_call|>{a:1,"})],
    ),
    lost("gemma4", "open quote", '<|tool_call>call:get_weather{city:<|"|>Paris}<tool_call|>'),
    lost("gemma4", "bare string", "<|tool_call>call:get_weather{city:Paris}<tool_call|>"),
    lost("gemma4", "no name", "<|tool_call>call:{city:1}<tool_call|>"),
    # --- DSML
    Transcript(
        "deepseek_v32", "as the template shows it",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        calls=[("get_weather", {"city": "Paris", "days": 2}), ("now", {})],
    ),
    Transcript(
        "deepseek_v32", "the mark decides where the schema is silent",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="rm">\n<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        calls=[("rm", {"a": "5", "b": 5})],
    ),
    Transcript(
        "deepseek_v32", "the schema goes before the mark",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        calls=[("get_weather", {"city": "5", "days": 5})],
    ),
    Transcript(
        "deepseek_v4", "lines are kept, after reasoning",
        'I look.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">\na\n\n'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        calls=[("get_weather", {"city": "\na\n\n"})], thought="I look.", reasoning="deepseek_r1", prompt="<think>",
    ),
    Transcript(
        "deepseek_v4", "no end of the call",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜tool_calls>",
        calls=WEATHER,
    ),
    lost("deepseek_v4", "no mark", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a">1</｜DSML｜parameter>\n</｜DSML｜invoke>'),
    # --- Kimi K3
    Transcript(
        "kimi_k3", "after reasoning and an empty response",
        'I look.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" '
        'index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|open|>argument key="days" '
        'type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        calls=[("get_weather", {"city": "Paris", "days": 2})], thought="I look.", reasoning="kimi_k3", prompt="<|open|>think<|sep|>",
    ),
    Transcript(
        "kimi_k3", "a response", "<|open|>response<|sep|>It rains.<|close|>response<|sep|><|close|>message<|sep|>", content="It rains.",
        reasoning="kimi_k3",
    ),
    # --- Hunyuan 3
    Transcript(
        "hy_v3_opensource", "after reasoning",
        "<think:opensource>I look.</think:opensource><tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        calls=WEATHER, thought="I look.", reasoning="hy_v3",
    ),
    Transcript(
        "hy_v3", "no line ends", "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call></tool_calls>",
        calls=WEATHER,
    ),
    # --- Solar Open
    Transcript(
        "solar_open", "after reasoning",
        '<|think|>I look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>'
        '{"city": "Paris"}<|tool_call:end|><|calls|>',
        calls=WEATHER, thought="I look.", reasoning="solar_open",
    ),
    Transcript(
        "solar_open", "an answer", "<|think|>I know.<|end|><|begin|>assistant<|content|>It rains.", content="It rains.",
        thought="I know.", reasoning="solar_open",
    ),
    # --- MiniCPM
    Transcript(
        "minicpm5", "CDATA",
        '<function name="get_weather"><param name="city"><![CDATA[</param> & <b>\n</function>]]></param><param name="days">2</param></function>',
        calls=[("get_weather", {"city": "</param> & <b>\n</function>", "days": 2})],
    ),
    Transcript(
        "minicpm5", "lists as Python writes them",
        '<function name="get_weather"><param name="tags">[\'a b\', 1, None]</param><param name="exact">True</param></function>',
        calls=[("get_weather", {"tags": ["a b", 1, None], "exact": True})],
    ),
    Transcript(
        "minicpm3", "after reasoning",
        '<|thought_start|>\nI look.\n<|thought_end|>\n<|tool_call_start|>\n```python\nget_weather(city="Paris")\nnow()\n```\n<|tool_call_end|>\n',
        calls=[*WEATHER, ("now", {})], thought="I look.", reasoning="minicpm3",
    ),
    # --- others
    Transcript(
        "apertus", "after reasoning", '<|inner_prefix|>I look.<|inner_suffix|><|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
        calls=WEATHER, thought="I look.", reasoning="apertus",
    ),
    lost("apertus", "two names in one", '<|tools_prefix|>[{"now": {}, "get_weather": {}}]<|tools_suffix|>'),
    lost("apertus", "a list of arguments", '<|tools_prefix|>[{"now": [1]}]<|tools_suffix|>'),
    Transcript(
        "apriel", "after reasoning", f"I look.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{JSON_OF_WEATHER}]</tool_calls>\n[END FINAL RESPONSE]",
        calls=WEATHER, thought="I look.", reasoning="apriel", prompt="<|begin_assistant|>\nHere are my reasoning steps:\n",
    ),
    Transcript("nemotron_json", "compact", f"<TOOLCALL>[{JSON_OF_WEATHER},{JSON_OF_WEATHER}]</TOOLCALL>", calls=WEATHER * 2),
    Transcript(
        "functionary_v31", "a line end and text before", '\nI look. <function=get_weather>{"city": "Paris"}</function><function=now>{}</function>',
        content="\nI look.", calls=[*WEATHER, ("now", {})],
    ),
    lost("functionary_v31", "tags inside", "<function=now><parameter=a>1</parameter></function>"),
    Transcript("gigachat3", "after text", f"I look.\n\nfunction call<|role_sep|>\n{JSON_OF_WEATHER}", content="I look.", calls=WEATHER),
    Transcript("gigachat3", "the newer token", f"<|function_call|>{JSON_OF_WEATHER}", calls=WEATHER),
    Transcript(
        "cohere_command_r", "spaced", 'Action: ```json\n[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]\n```', calls=WEATHER
    ),
    Transcript("lfm2", "JSON", f"<|tool_call_start|>[{JSON_OF_WEATHER}]<|tool_call_end|>", calls=WEATHER),
    Transcript(
        "lfm2", "a line ends in a string", "<|tool_call_start|>[get_weather(city='a\nb\\n\\\nc')]<|tool_call_end|>",
        calls=[("get_weather", {"city": "a\nb\nc"})],
    ),
    Transcript(
        "seed_oss", "a list as Python writes it",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=tags>['a', {'b': None}]</parameter>\n</function>\n</seed:tool_call>",
        calls=[("get_weather", {"tags": ["a", {"b": None}]})],
    ),
    Transcript(
        "seed_oss", "lines at the ends are kept",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\na\n</parameter>\n</function>\n</seed:tool_call>",
        calls=[("get_weather", {"city": "\na\n"})],
    ),
    Transcript(
        "openai", "the prompt's role has the recipient", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        calls=WEATHER, prompt="<|start|>assistant",
    ),
    Transcript("openai", "text about a recipient", " to=functions is what I write", content=" to=functions is what I write"),
    Transcript(
        "functionary_v32", "the prompt has the first marker", 'get_weather\n{"city": "Paris"}>>>now\n{}', calls=[*WEATHER, ("now", {})],
        reasoning="functionary_v32", prompt="assistant\n\n>>>",
    ),
    Transcript(
        "functionary_v32", "an answer, then a call", "all\nI look.>>>now\n{}", content="I look.", calls=[("now", {})],
        reasoning="functionary_v32", prompt="assistant\n\n>>>",
    ),
    Transcript(
        "functionary_v32", "an answer", "all\na >> b >>> c", content="a >> b >>> c", reasoning="functionary_v32",
        prompt="assistant\n\n>>>",
    ),
    Transcript(
        "functionary_v32", "no recipient", "It rains.", content="It rains.", reasoning="functionary_v32", prompt="assistant\n\n>>>"
    ),
    Transcript(
        "minimax_m3", "after reasoning",
        'I look.</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
        "]<]minimax[>[<tags>]<]minimax[>[<item>a <b>]<]minimax[>[</item>]<]minimax[>[<item>2]<]minimax[>[</item>]<]minimax[>[</tags>"
        "]<]minimax[>[<where>]<]minimax[>[<at>]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</at>]<]minimax[>[</where>]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
        calls=[("get_weather", {"city": "Paris", "tags": ["a <b>", 2], "where": {"at": {"x": 1}}})],
        thought="I look.", reasoning="minimax_m3", prompt="]~b]ai\n<mm:think>",
    ),
    Transcript(
        "minimax_m3", "empty elements",
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>]<]minimax[>[</city>]<]minimax[>[<tags>'
        "]<]minimax[>[</tags>]<]minimax[>[<where>]<]minimax[>[</where>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        calls=[("get_weather", {"city": "", "tags": [], "where": {}})],
    ),
    lost(
        "minimax_m3", "wrong nesting",
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">]<]minimax[>[<a>]<]minimax[>[<b>1]<]minimax[>[</a>]<]minimax[>[</b>'
        "]<]minimax[>[</invoke>",
    ),
    Transcript(
        "glm4", "two calls", 'get_weather\n{"city": "Paris"}<|assistant|>now\n{}', calls=[*WEATHER, ("now", {})],
    ),
    Transcript("glm4", "an answer", "\nget_weather says it rains.", content="\nget_weather says it rains."),
    lost("glm4", "an unknown name", 'paris\n{"city": 1}'),
    lost("glm4", "a name within a line", 'now {"city": 1}'),
    lost("glm4", "a word", "Now"),
    Transcript(
        "muse_glimmer", "reasoning, and a message to each tool",
        ' to=self<|message|>I look.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|>'
        '<atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
        calls=[*WEATHER, ("now", {})], thought="I look.", reasoning="muse_glimmer", prompt="<|start|>assistant",
    ),
    Transcript(
        "muse_glimmer", "an answer", " to=self<|message|>I know.<|eom|><|start|>assistant to=user<|message|>It rains.", content="It rains.",
        thought="I know.", reasoning="muse_glimmer", prompt="<|start|>assistant",
    ),
    # --- Cohere
    Transcript(
        "cohere_command3", "numbered",
        '<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
        '"get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        calls=WEATHER, thought="I look.", reasoning="cohere_command3",
    ),
    Transcript(
        "cohere_command3", "a response", "<|START_THINKING|>I know.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        content="It rains.", thought="I know.", reasoning="cohere_command3",
    ),
    Transcript(
        "cohere_command3", "a plan without an end", '<|START_THINKING|>I look.<|START_ACTION|>[{"tool_name": "now"}]<|END_ACTION|>',
        calls=[("now", {})], thought="I look.", reasoning="cohere_command3",
    ),
    # --- lists and objects of JSON
    Transcript("granite", "the other marker", f"<tool_call>[{JSON_OF_WEATHER}]", calls=WEATHER),
    Transcript("granite-20b-fc", "close", f"<function_call> {JSON_OF_WEATHER}</function_call>", calls=WEATHER),
    Transcript("internlm", "spaced", '<|action_start|> <|plugin|>{"name": "now", "parameters": {}}<|action_end|>\n', calls=[("now", {})]),
    Transcript("phi4_mini_json", "spaced", f"functools [{JSON_OF_WEATHER}]", calls=WEATHER),
    lost("phi4_mini_json", "the word", "functools is a module of Python."),
    Transcript("hunyuan_a13b", "one object", f"<tool_calls>{JSON_OF_WEATHER}</tool_calls>", calls=WEATHER),
    Transcript(
        "hunyuan_a13b", "after reasoning", f"<think>\nSo.\n</think>\n<answer>\n<tool_calls>[{JSON_OF_WEATHER}]</tool_calls>\n</answer>",
        calls=WEATHER, thought="So.", reasoning="hunyuan_a13b",
    ),
    Transcript(
        "hunyuan_dense", "after reasoning",
        '<think>\nSo.\n</think>\n<answer>\nI look.<tool_calls><tool_call>get_weather\n```json\n{"city": "Paris"}\n```</tool_call></tool_calls>\n</answer>',
        content="I look.", calls=WEATHER, thought="So.", reasoning="hunyuan_a13b",
    ),
    Transcript(
        "hunyuan_dense", "kind before the name",
        '<tool_calls><tool_call>function<tool_sep>get_weather\n```json\n{"city": "Paris"}\n```</tool_call></tool_calls>', calls=WEATHER,
    ),
    Transcript(
        "hunyuan_dense", "no fence closes", '<tool_calls><tool_call>get_weather\n```json\n{"city": "Paris"}</tool_call></tool_calls>',
        calls=WEATHER,
    ),
    Transcript("hunyuan_dense", "a list", f"<tool_calls>[{JSON_OF_WEATHER}]</tool_calls>", calls=WEATHER),
    Transcript(
        "hunyuan_dense", "no section", '<tool_call>get_weather\n```json\n{"city": "Paris"}\n```</tool_call>', calls=WEATHER
    ),
    Transcript(
        "nemotron_mini", "typed, the name last",
        '<toolcall> {"type": "function", "arguments": {"city": "Paris"}, "name": "get_weather"} </toolcall>', calls=WEATHER,
    ),
    Transcript(
        "hyperclovax", "reasoning, text and a call",
        f"/think\nSo.<|im_end|>\n<|im_start|>assistant\nI look.<|im_end|>\n<|im_start|>assistant -> tool/function_call\n[{JSON_OF_WEATHER}]<|im_end|>",
        content="I look.", calls=WEATHER, thought="So.", reasoning="hyperclovax", prompt="<|im_start|>assistant",
    ),
    Transcript(
        "hyperclovax", "the prompt thinks", "So.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>",
        content="Yes.", thought="So.", reasoning="hyperclovax", prompt="<|im_start|>assistant/think\n",
    ),
    Transcript(
        "hyperclovax", "a call at once", f" -> tool/function_call\n[{JSON_OF_WEATHER}, {JSON_OF_WEATHER}]<|im_end|>",
        calls=WEATHER * 2, reasoning="hyperclovax", prompt="<|im_start|>assistant",
    ),
    Transcript("dots", "as JSON", f"<dots_function_call>\n{JSON_OF_WEATHER}\n</dots_function_call>", calls=WEATHER),
    Transcript(
        "dots", "two, after text",
        'I look.<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">\nRome\n</parameter>\n<parameter name="days">\n2\n</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
        content="I look.", calls=TWO,
    ),
    Transcript(
        "plamo3", "after reasoning, without a constraint",
        "<|plamo:begin_think:plamo|>So.<|plamo:end_think:plamo|><|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        'get_weather<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>{"city": "Paris"}<|plamo:end_tool_arguments:plamo|>'
        "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
        calls=WEATHER, thought="So.", reasoning="plamo3",
    ),
    Transcript("llama4_pythonic", "JSON", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=WEATHER),
    Transcript(
        "llama4_pythonic", "JSON in the markers", f"<|python_start|>{JSON_OF_WEATHER}<|python_end|>", calls=WEATHER
    ),
    lost("llama4_pythonic", "another object", '{"name": "no tool", "parameters": {}}'),
    Transcript("nemotron_mini", "compact", f"<toolcall>{JSON_OF_WEATHER}</toolcall>", calls=WEATHER),
    Transcript("nemotron_mini", "no close", f"<toolcall> {JSON_OF_WEATHER}", calls=WEATHER),
    Transcript(
        "nemotron_mini", "two", f'<toolcall> {JSON_OF_WEATHER} </toolcall> <toolcall> {{"name": "now", "arguments": {{}}}} </toolcall>',
        calls=[*WEATHER, ("now", {})],
    ),
    lost("nemotron_mini", "an answer about tools", "a <tool> is no <toolcall> without JSON"),
    Transcript(
        "hermes", "EXAONE Deep, its prompt thinks", f"So.\n</thought>\n\n<tool_call>{JSON_OF_WEATHER}</tool_call>",
        calls=WEATHER, thought="So.", reasoning="exaone", prompt="[|assistant|]<thought>\n",
    ),
    Transcript("minimax", "no close", f"<tool_calls>\n{JSON_OF_WEATHER}\n", calls=WEATHER),
    Transcript("jamba", "compact", f"<tool_calls>[{JSON_OF_WEATHER}]</tool_calls>", calls=WEATHER),
    Transcript(
        "ernie45", "after reasoning", f"\n<think>\nSo.\n</think>\n\n\n<tool_call>\n{JSON_OF_WEATHER}\n</tool_call>\n",
        calls=WEATHER, thought="So.", reasoning="ernie45",
    ),
    Transcript("xlam", "fenced", f"```json\n[{JSON_OF_WEATHER}]\n```", calls=WEATHER),
    lost("xlam", "a fenced answer", '```json\n{"rain": true}\n```'),
    Transcript("json", "fenced", f"I look.\n```json\n{JSON_OF_WEATHER}\n```", content="I look.", calls=WEATHER),
    lost("json", "fenced code", '```json\n{"a": [1, 2]}\n```\nThat is all.'),
    # --- gpt-oss
    Transcript(
        "openai", "no constraint", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>', calls=WEATHER
    ),
    Transcript(
        "openai", "role has the recipient",
        '<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json'
        '<|message|>{"city": "Paris"}<|call|>',
        calls=WEATHER, thought="I look.", reasoning="openai_gptoss",
    ),
    Transcript(
        "openai", "no call marker", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        calls=WEATHER,
    ),
    Transcript(
        "openai", "preamble",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>",
        content="I look.", calls=[("now", {})],
    ),
    Transcript(
        "openai", "bad JSON", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{oops<|call|>",
        content="{oops",
    ),
)  # fmt: skip


def spoken(row: ToolFormat) -> str:
    """Words with every marker of a format between them, as an argument may hold them."""
    markers = {
        *row.opens,
        *row.closes,
        *row.skips,
        row.opening.strip(),
        row.closing.strip(),
        row.calls[0].before,
    }
    return " and ".join(["a", *sorted(markers - {""}), "z"])


def can_hold_its_markers(row: ToolFormat) -> bool:
    """Those of some are tokens and no text."""
    return row.name not in ("openai", "minimax_m3")


def written_by(row: ToolFormat) -> Iterator[Transcript]:
    """Yield the transcripts that every format can write."""
    everyone = " ".join(spoken(other) for other in FORMATS if other.name != row.name)
    cases: dict[str, Calls] = {
        "one": WEATHER,
        "several": TWO,
        "three alike": [("now", {})] * 3,
        "no arguments": [("now", {})],
        "nested": [
            ("get_weather", {"where": {"a": {"b": [{"c": []}, 1.5, None, False]}}, "tags": [[["x"]]]})
        ],
        "unicode": [("get_weather", {"city": "Zürich 🌍 東京 \u200d\u0301"})],
        "types": [("get_weather", {"city": "Rome", "days": -3, "exact": True, "limit": None, "tags": []})],
        "quotes": [("get_weather", {"city": "a \"quoted\" \\ back\\slash and 'single' one"})],
        "brackets": [("get_weather", {"city": "brackets ] } ) [ { ( and , ; :"})],
        "spaces": [("get_weather", {"city": " spaces "}), ("get_weather", {"city": ""})],
        "long": [("get_weather", {"city": "x" * 1000})],
        "what looks like other types": [("get_weather", {"city": "5"}), ("get_weather", {"city": "null"})],
        "lines": [("get_weather", {"city": "a\n\n b\tc\\n"})],
        "markers of others": [("get_weather", {"city": everyone})],
    }
    if can_hold_its_markers(row):
        cases["markers"] = [("get_weather", {"city": spoken(row)})]
    for what, calls in cases.items():
        yield Transcript(row.name, what, row.write(calls), calls=calls)
    yield Transcript(row.name, "no call", "I cannot know that. ", content="I cannot know that. ")
    if not row.bare and row.name != "openai":
        yield Transcript(
            row.name, "text before", f"I look.\n\n{row.write(TWO)}\n", content="I look.", calls=TWO
        )


TRANSCRIPTS = (*(one for row in FORMATS for one in written_by(row)), *WRITTEN)
