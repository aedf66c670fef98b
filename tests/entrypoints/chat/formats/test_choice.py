# SPDX-License-Identifier: Apache-2.0
"""Tests of the choice of formats by a template's markers, for each family, in templates of our own."""

from __future__ import annotations

import pytest

from quire.entrypoints.chat.formats.examples import examples_of
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.chat.formats.reasoning import REASONING_FORMATS
from quire.entrypoints.chat.formats.selection import choose
from quire.entrypoints.chat.formats.tools import TOOL_FORMATS
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ConfigError
from tests.fixtures.folded import folded

IM = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call>{{ '{' }}</tool_call>{% endif %}"
FAMILIES = {
    # family: (what its template says, tool format, reasoning format)
    "qwen2.5": (IM + HERMES, "hermes", None),
    "qwen3": (IM + HERMES + "{{ '<think>\\n\\n</think>\\n\\n' }}", "hermes", "qwen3"),
    "qwq": (IM + HERMES + "{{ content.split('</think>')[-1] }}<think>\n", "hermes", "qwen3"),
    "qwen3-coder": (
        IM + "<tool_call>\n<function=x>\n<parameter=y>\n</parameter>\n</function>",
        "qwen3_coder",
        None,
    ),
    "hermes-3": (IM + HERMES, "hermes", None),
    "smollm3": (IM + HERMES + "<think>\n\n</think>", "hermes", "qwen3"),
    "llama-3.1": (
        '<|start_header_id|>use {"name": function name, "parameters": dictionary of argument name and value}<|eot_id|>',
        "llama3_json",
        None,
    ),
    "llama-3.2": ("<|start_header_id|>[func_name1(params_name1=params_value1)]<|eot_id|>", "pythonic", None),
    "llama-4": (
        "<|header_start|>[func_name1(a=b)] <|python_start|><|python_end|><|eot|>",
        "llama4_pythonic",
        None,
    ),
    "mistral-7b-v0.3": ("[INST][AVAILABLE_TOOLS][/AVAILABLE_TOOLS][TOOL_CALLS][[/INST]", "mistral_v3", None),
    "mistral-small-3.2": ("[SYSTEM_PROMPT][TOOL_CALLS]name[ARGS]{}[INST]", "mistral", None),
    "magistral": ("[SYSTEM_PROMPT][THINK][/THINK][TOOL_CALLS]name[ARGS]{}", "mistral", "mistral"),
    "deepseek-v3": (
        "<｜User｜><｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}",
        "deepseek_v3",
        None,
    ),
    "deepseek-r1": (
        "<｜User｜><｜Assistant｜>{{ content.split('</think>')[-1] }}<｜tool▁sep｜>\n```json\n{}",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "deepseek-v3.1": (
        "<｜Assistant｜><think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "deepseek_v31",
        "deepseek_r1",
    ),
    "kimi-k2": (
        "<|im_system|><|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>",
        "kimi_k2",
        None,
    ),
    "kimi-k2-thinking": (
        "<|im_assistant|><think></think><|tool_calls_section_begin|><|tool_call_argument_begin|>",
        "kimi_k2",
        "kimi_k2",
    ),
    "glm-4.5": (
        "[gMASK]<sop><tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></tool_call><think></think>",
        "glm45",
        "glm45",
    ),
    "granite-3": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>[", "granite", None),
    "granite-3.2": (
        "<|start_of_role|><|tool_call|>write 'Here is my thought process:' and 'Here is my response:'",
        "granite",
        "granite",
    ),
    "granite-4": ("<|start_of_role|><tools></tools><tool_call>{}</tool_call>", "hermes", None),
    "granite-20b-fc": ("SYSTEM: <function_call> {}", "granite-20b-fc", None),
    "phi-4-mini": ("<|system|><|tool|>{{ tools }}<|/tool|><|end|>", "phi4_mini_json", None),
    "internlm2.5": ("<|im_start|><|action_start|><|plugin|>{}<|action_end|>", "internlm", None),
    "jamba-1.5": ("<|bom|><|system|> <tool_calls>[{}]</tool_calls><|eom|>", "jamba", None),
    "minimax-m1": ("<beginning_of_sentence>ai<tool_calls>{}</tool_calls><end_of_sentence>", "minimax", None),
    "minimax-m2": (
        ']~b]ai <think>\n<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>[e~[',
        "minimax_m2",
        "minimax_m2",
    ),
    "hunyuan-a13b": (
        "<|startoftext|><think></think><answer></answer><tool_calls>[{}]</tool_calls>",
        "hunyuan_a13b",
        "hunyuan_a13b",
    ),
    "command-r7b": (
        "<|START_OF_TURN_TOKEN|><|START_THINKING|><|END_THINKING|><|START_ACTION|>[]<|END_ACTION|><|START_RESPONSE|>",
        "cohere_command3",
        "cohere_command3",
    ),
    "olmo-3": (IM + "<function_calls>f()</function_calls>", "olmo3", None),
    "olmo-3-think": (IM + "<function_calls>f()</function_calls><think>", "olmo3", "olmo3"),
    "ernie-4.5-thinking": (
        "<|im_start|><think></think><response></response><tool_call>{}</tool_call>",
        "ernie45",
        "ernie45",
    ),
    "seed-oss": (
        "<seed:bos><seed:think></seed:think><seed:tool_call><function=f><parameter=p></seed:tool_call>",
        "seed_oss",
        "seed_oss",
    ),
    "functiongemma": (
        "<start_of_turn><start_function_call>call:f{}<end_function_call>",
        "functiongemma",
        None,
    ),
    "gpt-oss": (
        "<|start|>assistant<|channel|>analysis<|message|> to=functions.f <|constrain|>json",
        "openai",
        "openai_gptoss",
    ),
    "lfm2": (IM + "<|tool_list_start|><|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", None),
    "lfm2-8b": (IM + "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "lfm2", None),
    "lfm2.5": (IM + "List of tools: [{{ tools }}] {{ content.split('</think>')[-1] }}", "lfm2", "qwen3"),
    "gemma-4": (
        '<|turn>model\n<|channel>thought\n<channel|><|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>',
        "gemma4",
        "gemma4",
    ),
    "nemotron-nano-2": (
        "<SPECIAL_11>Assistant\n<think>\n</think><TOOLCALL>[{}]</TOOLCALL>",
        "nemotron_json",
        "think",
    ),
    "llama-nemotron": (
        "<|start_header_id|><TOOLCALL>[{}]</TOOLCALL><|python_tag|>",
        "nemotron_json",
        None,
    ),
    "deepseek-v3.2": (
        "{% set dsml_token = '｜DSML｜' %}<｜Assistant｜></think>{{ '<' + dsml_token + 'function_calls>' }}",
        "deepseek_v32",
        "deepseek_r1",
    ),
    "deepseek-v4": (
        "{% set dsml_token = '｜DSML｜' %}<｜Assistant｜></think>{{ '<' + dsml_token + 'tool_calls>' }}",
        "deepseek_v4",
        "deepseek_r1",
    ),
    "functionary-3.1": (
        "<|start_header_id|><function=f>{}</function><|python_tag|>",
        "functionary_v31",
        None,
    ),
    "functionary-3.2": (
        "<|start_header_id|>{{ '>>>all\\n' + content }}{{ '>>>' + name }}",
        "functionary_v32",
        "functionary_v32",
    ),
    "command-r-plus": (
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>\nAction:\n```json\n[]```",
        "cohere_command_r",
        None,
    ),
    "gigachat-3": ("assistant<|role_sep|>\nfunction call<|role_sep|>\n{}<|message_sep|>", "gigachat3", None),
    "gigachat-3.1": ("assistant<|role_sep|>\n<|function_call|>{}<|message_sep|>", "gigachat31", None),
    "minicpm-3": (
        IM + "<|thought_start|>\n<|thought_end|><|tool_call_start|>\n```python\nf()\n```\n<|tool_call_end|>",
        "minicpm3",
        "minicpm3",
    ),
    "minicpm-5": (
        IM + '<think></think><function name="f"><param name="p"></param></function><tool_sep>',
        "minicpm5",
        "qwen3",
    ),
    "solar-open": (
        "<|begin|>assistant<|think|><|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>",
        "solar_open",
        "solar_open",
    ),
    "hunyuan-3": (
        "<think></think><tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>",
        "hy_v3",
        "hy_v3",
    ),
    "hunyuan-3-open": (
        "{% set suffix = ':opensource' %}{{ '<think{}>'.format(suffix) }}{{ '<tool_sep{}>' }}{{ '<arg_key{}>' }}",
        "hy_v3_opensource",
        "hy_v3",
    ),
    "kimi-k3": (
        "{{ '<|open|>' }}{{ open_tag('think') }}{{ open_tag('call', []) }}<|sep|>",
        "kimi_k3",
        "kimi_k3",
    ),
    "apertus": (
        "<|assistant_start|><|inner_prefix|><|inner_suffix|><|tools_prefix|>[]<|tools_suffix|>",
        "apertus",
        "apertus",
    ),
    "apriel": (
        "Here are my reasoning steps:\n[BEGIN FINAL RESPONSE]<tool_calls>[]</tool_calls>",
        "apriel",
        "apriel",
    ),
    "glm-4.7": (
        "[gMASK]<sop><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call><think></think>",
        "glm47",
        "glm45",
    ),
    "minimax-m2-results": (
        "]~b]ai\n<think>\n<minimax:tool_call></minimax:tool_call>]~b]tool\n<response></response>",
        "minimax_m2",
        "minimax_m2",
    ),
    "minimax-m3": (
        "{% set token = ']<]minimax[>[' %}{{ '<mm:think>' }}{{ token ~ '<tool_call>' }}]~b]tool <response></response>",
        "minimax_m3",
        "minimax_m3",
    ),
    "glm-4-0414": (
        "[gMASK]<sop><|system|>\n# 可用工具\n在调用上述函数时，请使用 Json 格式表示调用的参数。<|observation|>",
        "glm4",
        None,
    ),
    "muse-glimmer": (
        "<|start|>assistant to=self<|message|><|eom|><atem:function_calls></atem:function_calls><|eot|>",
        "muse_glimmer",
        "muse_glimmer",
    ),
    "exaone-deep": (
        "{{ content.split('</thought>')[-1] }}[|endofturn|]\n[|assistant|]<thought>\n",
        None,
        "exaone",
    ),
    "hyperclova-x-seed-think": (
        "<|im_start|>assistant/think\n<|im_end|>\n<|im_start|>assistant -> tool/function_call\n[]<|im_end|>",
        "hyperclovax",
        "hyperclovax",
    ),
    "exaone-4": (
        "[|assistant|]\n<think>\n\n</think>\n\n<tool_call>{}</tool_call>[|endofturn|]",
        "hermes",
        "think",
    ),
    "dots-3": ("Use <dots_function_call> for tools<|endofresponse|><think></think>", "dots", "think"),
    "plamo-3": (
        "<|plamo:begin_think:plamo|><|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>",
        "plamo3",
        "plamo3",
    ),
    "xlam-2": (
        "<|start_header_id|>When using tools, make calls in a single JSON array: []<|eot_id|>",
        "xlam",
        None,
    ),
    "hunyuan-7b": (
        "<tools></tools>{{ '<tool_calls><tool_call>' + name + '\n' + '```json' }}</tool_calls><think></think><answer>",
        "hunyuan_dense",
        "hunyuan_a13b",
    ),
    "minitron": (
        "<extra_id_0>System{% for tool in tools %}\n<tool> {{ tool }} </tool>{% endfor %}<extra_id_1>User",
        "nemotron_mini",
        None,
    ),
    "glm-4-9b": (
        "[gMASK]<sop>{% set tools = item['tools'] %}在调用上述函数时，请使用 Json 格式表示调用的参数。",
        "glm4",
        None,
    ),
    "granite-3.3": (
        "<|start_of_role|>{{ '<|tool_call|>' }} write <think></think> and <response></response><|end_of_role|>",
        "granite",
        "ernie45",
    ),
    "phi-4-reasoning": ("<|im_start|>system<|im_sep|> <think> {Thought section} </think>", None, "qwen3"),
    "gemma-3": ("<start_of_turn>user\n{{ message.content }}<end_of_turn>", None, None),
    "vicuna": ("USER: {{ message.content }} ASSISTANT:", None, None),
}


@folded("family", FAMILIES)
def test_template_determines_its_formats(family: str) -> None:
    template, tools, reasoning = FAMILIES[family]
    chosen = choose("auto", "auto", template)
    assert (chosen.tools and chosen.tools.name, chosen.reasoning and chosen.reasoning.name) == (
        tools,
        reasoning,
    )


def test_format_option_overrides_the_template() -> None:
    template = FAMILIES["qwen3"][0]
    chosen = choose("llama3_json", "none", template)
    assert (chosen.tools and chosen.tools.name, chosen.reasoning) == ("llama3_json", None)
    assert "llama3_json" in chosen.describe()


@folded("name", ["gpt_oss", "internlm2", "qwen3_xml", "phi4_mini", "hermes", "json"])
def test_aliases_are_names(name: str) -> None:
    assert choose(name, "none", None).tools is TOOL_FORMATS.resolve(name)


def test_unknown_format_name_error_lists_known_names() -> None:
    with pytest.raises(ConfigError, match=r"--reasoning-parser must be one of auto, none, .*qwen3"):
        choose("auto", "qwen4", None)
    assert "deepseek_r1" in REASONING_FORMATS.names()


class SpecialTokens:
    """A tokenizer with a token for each of some markers, and one per character besides."""

    special_tokens = frozenset({"<think>", "</think>", "<|tool_call_begin|>", "<|im_end|>"})

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        if text in self.special_tokens:
            return [1000 + sorted(self.special_tokens).index(text)]
        return [ord(char) for char in text]


def test_only_the_special_tokens_of_the_formats_are_shown() -> None:
    tokenizer = SpecialTokens()
    shown = ModelFormat(choose("kimi_k2", "think", None), tokenizer).shown_ids
    markers = ("<think>", "</think>", "<|tool_call_begin|>")
    assert sorted(shown) == sorted(token_id for marker in markers for token_id in tokenizer.encode(marker))


@folded(
    ("marked", "begin", "num_tokens"),
    [
        ("<think>|abc|</think>|def", "", 3),
        ("abc|</think>|def", "<think>\n", 3),
        ("<think>|abc|</think>|def", "<think>\n", 3),
        ("abc", "", 0),
        ("<think>|abc", "", 3),
        ("<think>|</think>|abc", "", 0),
    ],
)
def test_tokens_between_markers_are_counted_in_any_pieces(marked: str, begin: str, num_tokens: int) -> None:
    tokenizer = SpecialTokens()
    ids = [token_id for part in marked.split("|") for token_id in tokenizer.encode(part)]
    formats = ModelFormat(choose("none", "think", None), tokenizer)
    for size in (1, 2, len(ids)):
        counter = formats.counter(PromptEnd(begin), None)
        assert counter is not None
        for start in range(0, len(ids), size):
            counter.add(ids[start : start + size])
            counter.resolve(())
        assert counter.num_tokens == num_tokens


THINKS = "{% if thought %}<{{ r }}>\n{{ thought }}\n</{{ r }}>\n\n{% endif %}"
GEMMA_THINKS = "{% if thought %}<{{ p }}channel>thought\n{{ thought }}\n<channel{{ p }}>{% endif %}"
HERMES_CALL = """<{{ t }}>
{{ '{' }}"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}{{ '}' }}
</{{ t }}>"""
GEMMA_CALL = (
    "<{{ p }}tool_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments.items() %}{{ k }}:"
    '{% if v is string %}<{{ p }}"{{ p }}>{{ v }}<{{ p }}"{{ p }}>{% else %}{{ v }}{% endif %}'
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call{{ p }}>"
)
WRITTEN = "{}{{{{ content }}}}{{% for c in calls %}}{}{{% endfor %}}"
RENDERING = {
    # What a template writes of a message, without words that are evidence, and the formats that read it.
    "hermes": (
        "{% set t = 'tool_call' %}{% set r = 'think' %}" + WRITTEN.format(THINKS, HERMES_CALL),
        "hermes",
        "think",
    ),
    "gemma4": (
        "{% set p = '|' %}" + WRITTEN.format(GEMMA_THINKS, GEMMA_CALL),
        "gemma4",
        "gemma4",
    ),
}
CONVERSATION = (
    "{% if tools %}TOOLS{% endif %}{% for m in messages %}<{{ m.role }}>{% set thought = m.reasoning_content %}"
    "{% set content = m.content %}{% set calls = (m.tool_calls or []) | map(attribute='function') | list %}"
    "WRITTEN{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("name", RENDERING)
def test_choose_template_without_evidence_takes_a_reader(name: str) -> None:
    written, tools, reasoning = RENDERING[name]
    source = CONVERSATION.replace("WRITTEN", written)
    template = ChatTemplate(source)
    told = choose("auto", "auto", source)
    assert (told.tools, told.reasoning) == (None, None)
    chosen = choose("auto", "auto", source, examples_of(template))
    assert chosen.tools is not None
    assert chosen.reasoning is not None
    calls = [("f", {"a": "x"}), ("g", {})]
    assert chosen.tools.write(calls) == TOOL_FORMATS.resolve(tools).write(calls)
    assert chosen.reasoning.opens == REASONING_FORMATS.resolve(reasoning).opens


def test_choose_evidence_of_another_format_is_overruled() -> None:
    source = CONVERSATION.replace("WRITTEN", RENDERING["gemma4"][0]) + "{# unlike <tool_call> and <think> #}"
    assert choose("auto", "auto", source).tools is TOOL_FORMATS.resolve("hermes")
    chosen = choose("auto", "auto", source, examples_of(ChatTemplate(source)))
    assert chosen.tools is TOOL_FORMATS.resolve("gemma4")
    assert chosen.reasoning is REASONING_FORMATS.resolve("gemma4")


@pytest.mark.parametrize(
    "source", ["{{ messages.absent.field }}", "{{ raise_exception('no') }}", "{{ tools[0].x.y }}"]
)
def test_choose_template_that_fails_goes_by_evidence(source: str) -> None:
    source += "<|im_start|><tool_call>"
    chosen = choose("auto", "auto", source, examples_of(ChatTemplate(source)))
    assert chosen.tools is TOOL_FORMATS.resolve("hermes")
