"""The table of tool formats; names as in vLLM's `--tool-call-parser`.

Sources: the chat templates and model cards of each family. A template is asked for evidence in the order of the
table, so what is more particular stands first.
"""

from __future__ import annotations

import re
from string import ascii_letters

from quire.entrypoints.chat.formats.elements import ElementCall
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.languages import GemmaCall
from quire.entrypoints.chat.formats.python_call import PythonCall
from quire.entrypoints.chat.formats.syntax import (
    HeadedJson,
    JsonCall,
    LineCall,
    NamedJson,
    TaggedCall,
)
from quire.entrypoints.chat.formats.typed import KINDS
from quire.plugins import PluginTable, instance_of

LIST = ("[", "]", ",")
"""What stands around and between the items of a list."""
MISTRAL_HEAD = r"(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?"
PLAMO_CALL = "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
PLAMO_ARGUMENTS = "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
PLAMO_HEAD = (
    rf"(?P<name>[\w.\-]+)\s*{re.escape(PLAMO_ARGUMENTS)}\s*"
    r"(?:<\|plamo:constrain\|>json)?\s*(?:<\|plamo:msg\|>)?"
)
PLAMO_WRITTEN = f"{{name}}{PLAMO_ARGUMENTS}<|plamo:constrain|>json<|plamo:msg|>"
PLAMO_END = "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
HUNYUAN_HEAD = r"(?:function<tool_sep>)?(?P<name>[\w.\-]+)\s*```json"
XML_CALL = TaggedCall(
    "<function=", ">", "<parameter=", ">", "</parameter>", "</function>", outer="</tool_call>"
)


def dsml(name: str, section: str) -> ToolFormat:
    """Return DeepSeek's markup, in which each value says whether it is a string."""
    opening, closing = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    call = TaggedCall(
        '<｜DSML｜invoke name="',
        '">',
        '<｜DSML｜parameter name="',
        '" string="{mark}">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        padding="",
        outer=closing,
        marks=("true", "false"),
    )
    evidence = ((opening,), ("｜DSML｜", f"{section}>"))
    return ToolFormat(
        name,
        (call,),
        opens=(opening,),
        closes=(closing,),
        opening=f"{opening}\n",
        closing=f"\n{closing}",
        evidence=evidence,
    )


def glm(name: str, gap: str, evidence: tuple[str, ...], *aliases: str) -> ToolFormat:
    """Return GLM's tags with this between them."""
    key_close = f"</arg_key>{gap}<arg_value>"
    call = TaggedCall("", "", "<arg_key>", key_close, "</arg_value>", "</tool_call>", padding="", gap=gap)
    return ToolFormat(
        name,
        (call,),
        opens=("<tool_call>",),
        opening="<tool_call>",
        separator=gap,
        each=True,
        evidence=(evidence,),
        aliases=aliases,
    )


def hunyuan(name: str, suffix: str, evidence: tuple[str, ...]) -> ToolFormat:
    """Return Hunyuan 3's tags, of which the names end in a suffix."""
    opening, closing = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    call = TaggedCall(
        f"<tool_call{suffix}>",
        f"<tool_sep{suffix}>",
        f"<arg_key{suffix}>",
        f"</arg_key{suffix}>\n<arg_value{suffix}>",
        f"</arg_value{suffix}>",
        f"</tool_call{suffix}>",
        padding="",
        outer=closing,
    )
    return ToolFormat(
        name,
        (call,),
        opens=(opening,),
        closes=(closing,),
        opening=f"{opening}\n",
        closing=f"\n{closing}",
        evidence=(evidence,),
    )


def gigachat(name: str, opening: str) -> ToolFormat:
    """Return GigaChat's calls, which are messages of a role, or stand behind a token."""
    return ToolFormat(
        name,
        (JsonCall(),),
        opens=("<|function_call|>", "function call<|role_sep|>\n"),
        opening=opening,
        each=True,
        evidence=(("<|role_sep|>", opening.split("<|role_sep|>")[0]),),
    )


FORMATS = (
    ToolFormat(
        "openai",
        (
            HeadedJson(
                "<|channel|>commentary to=functions.",
                r"(?P<name>[\w.\-]+) <\|constrain\|>json<\|message\|>",
                "{name} <|constrain|>json<|message|>",
            ),
        ),
        opening="<|start|>assistant",
        closing="<|call|>",
        separator="",
        each=True,
        evidence=(("<|channel|>", "functions."),),
        aliases=("gpt_oss",),
    ),
    ToolFormat(
        "functiongemma",
        (GemmaCall("<end_function_call>", "<escape>"),),
        opens=("<start_function_call>",),
        opening="<start_function_call>",
        separator="",
        each=True,
        evidence=(("<start_function_call>",),),
    ),
    ToolFormat(
        "gemma4",
        (GemmaCall("<tool_call|>", '<|"|>'),),
        opens=("<|tool_call>",),
        opening="<|tool_call>",
        separator="",
        each=True,
        evidence=(("<|tool_call>",),),
    ),
    ToolFormat(
        "kimi_k3",
        (
            TaggedCall(
                '<|open|>call tool="',
                '" index="{index}"<|sep|>',
                '<|open|>argument key="',
                '" type="{mark}"<|sep|>',
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
                padding="",
                gap="",
                marks=KINDS,
                index_from=1,
            ),
        ),
        opens=("<|open|>tools<|sep|>",),
        closes=("<|close|>tools<|sep|>",),
        opening="<|open|>tools<|sep|>",
        separator="",
        closing="<|close|>tools<|sep|>",
        evidence=(("<|open|>", "open_tag('call'"), ("<|open|>call tool=",)),
    ),
    ToolFormat(
        "kimi_k2",
        (
            HeadedJson(
                "<|tool_call_begin|>",
                r"(?P<id>(?:functions\.)?+(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
                "functions.{name}:{index}<|tool_call_argument_begin|>",
            ),
        ),
        opens=("<|tool_calls_section_begin|>",),
        closes=("<|tool_calls_section_end|>",),
        skips=("<|tool_call_end|>",),
        opening="<|tool_calls_section_begin|>",
        separator="<|tool_call_end|>",
        closing="<|tool_call_end|><|tool_calls_section_end|>",
        evidence=(("<|tool_call_argument_begin|>",),),
    ),
    ToolFormat(
        "deepseek_v3",
        (
            HeadedJson(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                r"(?P<name>[^\s{}]+)\s*```json",
                "{name}\n```json\n",
            ),
        ),
        opens=("<｜tool▁calls▁begin｜>",),
        closes=("<｜tool▁calls▁end｜>",),
        skips=("```", "<｜tool▁call▁end｜>"),
        opening="<｜tool▁calls▁begin｜>",
        separator="\n```<｜tool▁call▁end｜>\n",
        closing="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        evidence=(("<｜tool▁sep｜>", "```json"),),
    ),
    ToolFormat(
        "deepseek_v31",
        (
            HeadedJson(
                "<｜tool▁call▁begin｜>", r"(?P<name>[^\s{}<]+)\s*<｜tool▁sep｜>", "{name}<｜tool▁sep｜>"
            ),
        ),
        opens=("<｜tool▁calls▁begin｜>",),
        closes=("<｜tool▁calls▁end｜>",),
        skips=("<｜tool▁call▁end｜>",),
        opening="<｜tool▁calls▁begin｜>",
        separator="<｜tool▁call▁end｜>",
        closing="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        evidence=(("<｜tool▁sep｜>",),),
    ),
    dsml("deepseek_v32", "function_calls"),
    dsml("deepseek_v4", "tool_calls"),
    ToolFormat(
        "cohere_command3",
        (JsonCall(("tool_name", "name"), ("parameters", "arguments"), ("tool_call_id",)),),
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        skips=LIST,
        opening="<|START_ACTION|>[\n    ",
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        evidence=(("<|START_ACTION|>",),),
        aliases=("command_r", "cohere_command4"),
    ),
    ToolFormat(
        "cohere_command_r",
        (JsonCall(("tool_name", "name"), ("parameters", "arguments")),),
        opens=("Action: ```json", "Action:\n```json", "Action:```json"),
        closes=("```",),
        skips=LIST,
        opening="Action:\n```json\n[\n    ",
        separator=",\n    ",
        closing="\n]\n```",
        evidence=(("<|START_OF_TURN_TOKEN|>", "Action:"),),
    ),
    ToolFormat(
        "minicpm5",
        (
            TaggedCall(
                "",
                '">',
                '<param name="',
                '">',
                "</param>",
                "</function>",
                padding="",
                gap="",
                quotes=("<![CDATA[", "]]>"),
            ),
        ),
        opens=('<function name="',),
        opening='<function name="',
        each=True,
        evidence=(("<function name=", "<param name="),),
    ),
    hunyuan("hy_v3_opensource", ":opensource", ("<tool_sep", "<arg_key", ":opensource")),
    hunyuan("hy_v3", "", ("<tool_sep", "<arg_key")),
    ToolFormat(
        "solar_open",
        (
            HeadedJson(
                "<|tool_call:begin|>",
                r"(?:(?P<id>[^\s<>|]*)\s*<\|tool_call:name\|>)?\s*(?P<name>[\w.\-]+)\s*<\|tool_call:args\|>",
                "{id}<|tool_call:name|>{name}<|tool_call:args|>",
            ),
        ),
        opens=("<|tool_calls|>",),
        closes=("<|calls|>",),
        skips=("<|tool_call:end|>",),
        opening="<|tool_calls|>",
        separator="<|tool_call:end|>",
        closing="<|tool_call:end|><|calls|>",
        evidence=(("<|tool_call:begin|>",),),
    ),
    ToolFormat(
        "apertus",
        (NamedJson(),),
        opens=("<|tools_prefix|>",),
        closes=("<|tools_suffix|>",),
        skips=LIST,
        opening="<|tools_prefix|>[",
        separator=", ",
        closing="]<|tools_suffix|>",
        evidence=(("<|tools_prefix|>",),),
    ),
    ToolFormat(
        "nemotron_json",
        (JsonCall(),),
        opens=("<TOOLCALL>",),
        closes=("</TOOLCALL>",),
        skips=LIST,
        opening="<TOOLCALL>[",
        separator=", ",
        closing="]</TOOLCALL>",
        evidence=(("<TOOLCALL>",),),
        aliases=("llama_nemotron_json",),
    ),
    ToolFormat(
        "dots",
        (
            TaggedCall(
                '<invoke name="',
                '">',
                '<parameter name="',
                '">',
                "</parameter>",
                "</invoke>",
                outer="</dots_function_call>",
            ),
            JsonCall(),
        ),
        opens=("<dots_function_call>",),
        closes=("</dots_function_call>",),
        opening="<dots_function_call>\n",
        closing="\n</dots_function_call>",
        evidence=(("<dots_function_call>",),),
    ),
    ToolFormat(
        "plamo3",
        (HeadedJson(PLAMO_CALL, PLAMO_HEAD, PLAMO_WRITTEN),),
        opens=("<|plamo:begin_tool_requests:plamo|>",),
        closes=("<|plamo:end_tool_requests:plamo|>",),
        skips=("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>"),
        opening="<|plamo:begin_tool_requests:plamo|>",
        separator=PLAMO_END,
        closing=f"{PLAMO_END}<|plamo:end_tool_requests:plamo|>",
        evidence=(("<|plamo:begin_tool_request:plamo|>",), ("plamo:begin_", "tool_request")),
    ),
    ToolFormat(
        "hyperclovax",
        (JsonCall(),),
        opens=(" -> tool/function_call\n",),
        closes=("<|im_end|>",),
        skips=LIST,
        opening=" -> tool/function_call\n[",
        separator=", ",
        closing="]<|im_end|>",
        evidence=(("-> tool/function_call",),),
    ),
    ToolFormat(
        "nemotron_mini",
        (JsonCall(),),
        opens=("<toolcall>",),
        closes=("</toolcall>",),
        skips=LIST,
        opening="<toolcall> ",
        separator=" ",
        closing=" </toolcall>",
        each=True,
        evidence=(("<toolcall>",), ("<extra_id_1>", "<tool>")),
    ),
    gigachat("gigachat31", "<|function_call|>"),
    gigachat("gigachat3", "function call<|role_sep|>\n"),
    ToolFormat(
        "seed_oss",
        (
            TaggedCall(
                "<function=",
                ">",
                "<parameter=",
                ">",
                "</parameter>",
                "</function>",
                padding="",
                outer="</seed:tool_call>",
            ),
        ),
        opens=("<seed:tool_call>",),
        closes=("</seed:tool_call>",),
        opening="<seed:tool_call>\n",
        closing="\n</seed:tool_call>",
        each=True,
        evidence=(("<seed:tool_call>",),),
    ),
    ToolFormat(
        "minimax_m2",
        (
            TaggedCall(
                '<invoke name="',
                '">',
                '<parameter name="',
                '">',
                "</parameter>",
                "</invoke>",
                padding="",
                outer="</minimax:tool_call>",
            ),
        ),
        opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        opening="<minimax:tool_call>\n",
        closing="\n</minimax:tool_call>",
        evidence=(("minimax:tool_call",),),
    ),
    ToolFormat(
        "minimax_m3",
        (ElementCall("]<]minimax[>["),),
        opens=("]<]minimax[>[<tool_call>",),
        closes=("]<]minimax[>[</tool_call>",),
        opening="]<]minimax[>[<tool_call>\n",
        closing="\n]<]minimax[>[</tool_call>",
        evidence=(("]<]minimax[>[",),),
    ),
    ToolFormat(
        "muse_glimmer",
        (
            TaggedCall(
                '<atem:invoke name="',
                '">',
                '<atem:parameter name="',
                '">',
                "</atem:parameter>",
                "</atem:invoke>",
                padding="",
                outer="</atem:function_calls>",
            ),
        ),
        opens=("<atem:function_calls>",),
        closes=("</atem:function_calls>",),
        opening="<atem:function_calls>\n",
        closing="\n</atem:function_calls>",
        each=True,
        evidence=(("<atem:function_calls>",),),
    ),
    ToolFormat(
        "glm4",
        (LineCall("", r"(?P<name>[\w\-]+)", "{name}\n"),),
        opens=("<|assistant|>",),
        skips=("<|assistant|>",),
        bare=f"{ascii_letters}_",
        needs_required=True,
        only_known=True,
        separator="<|assistant|>",
        evidence=(("请使用 Json 格式表示调用的参数",),),
    ),
    glm("glm47", "", ("</arg_key><arg_value>",), "poolside_v1", "ling3"),
    glm("glm45", "\n", ("<arg_key>",)),
    ToolFormat(
        "qwen3_coder",
        (XML_CALL, JsonCall()),
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        opening="<tool_call>\n",
        closing="\n</tool_call>",
        each=True,
        evidence=(("<tool_call>", "<function="),),
        aliases=("qwen3_xml", "step3p5", "mimo"),
    ),
    ToolFormat(
        "functionary_v32",
        (HeadedJson("", r"(?P<name>[\w.\-]+)", "{name}\n"),),
        opens=(">>>",),
        opening=">>>",
        separator="",
        each=True,
        evidence=((">>>all",),),
    ),
    ToolFormat(
        "functionary_v31",
        (HeadedJson("", r"(?P<name>[\w.\-]+)\s*>", "{name}>"),),
        opens=("<function=",),
        closes=("</function>",),
        opening="<function=",
        separator="",
        closing="</function>",
        each=True,
        evidence=(("<function=",),),
    ),
    ToolFormat(
        "mistral",
        (HeadedJson("", MISTRAL_HEAD, "{name}[ARGS]"), JsonCall()),
        opens=("[TOOL_CALLS]",),
        skips=(*LIST, "[TOOL_CALLS]"),
        opening="[TOOL_CALLS]",
        separator="",
        each=True,
        evidence=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    ToolFormat(
        "mistral_v3",
        (JsonCall(), HeadedJson("", MISTRAL_HEAD, "{name}[ARGS]")),
        opens=("[TOOL_CALLS]",),
        skips=(*LIST, "[TOOL_CALLS]"),
        opening="[TOOL_CALLS] [",
        separator=", ",
        closing="]",
        evidence=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        "granite-20b-fc",
        (JsonCall(),),
        opens=("<function_call>",),
        closes=("</function_call>",),
        skips=(*LIST, "<function_call>"),
        opening="<function_call> ",
        each=True,
        evidence=(("<function_call>",),),
    ),
    ToolFormat(
        "granite",
        (JsonCall(),),
        opens=("<|tool_call|>", "<tool_call>"),
        closes=("</tool_call>",),
        skips=LIST,
        opening="<|tool_call|>[",
        separator=", ",
        closing="]",
        evidence=(("<|tool_call|>",),),
    ),
    ToolFormat(
        "internlm",
        (JsonCall(("name",), ("parameters", "arguments")),),
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        closes=("<|action_end|>",),
        opening="<|action_start|><|plugin|>\n",
        closing="<|action_end|>",
        each=True,
        evidence=(("<|action_start|>",), ("<|plugin|>",)),
        aliases=("internlm2",),
    ),
    ToolFormat(
        "phi4_mini_json",
        (JsonCall(),),
        opens=("functools",),
        skips=LIST,
        opening="functools[",
        separator=", ",
        closing="]",
        evidence=(("functools",), ("<|tool|>", "<|/tool|>")),
        aliases=("phi4_mini",),
    ),
    ToolFormat(
        "minicpm3",
        (PythonCall(),),
        opens=("<|tool_call_start|>",),
        closes=("<|tool_call_end|>",),
        skips=("```python", "```"),
        opening="<|tool_call_start|>\n```python\n",
        closing="\n```\n<|tool_call_end|>",
        evidence=(("<|tool_call_start|>", "```python"),),
    ),
    ToolFormat(
        "lfm2",
        (PythonCall(), JsonCall()),
        opens=("<|tool_call_start|>",),
        closes=("<|tool_call_end|>",),
        skips=LIST,
        opening="<|tool_call_start|>[",
        separator=", ",
        closing="]<|tool_call_end|>",
        evidence=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|im_start|>", "List of tools: [")),
    ),
    ToolFormat(
        "llama4_pythonic",
        (PythonCall(), JsonCall(("name",), ("parameters", "arguments"))),
        opens=("<|python_start|>",),
        closes=("<|python_end|>",),
        skips=(*LIST, ";"),
        bare="[{",
        only_known=True,
        opening="<|python_start|>[",
        separator=", ",
        closing="]<|python_end|>",
        evidence=(("<|python_start|>",),),
    ),
    ToolFormat(
        "olmo3",
        (PythonCall(),),
        opens=("<function_calls>",),
        closes=("</function_calls>",),
        skips=LIST,
        opening="<function_calls>\n",
        closing="\n</function_calls>",
        evidence=(("<function_calls>",),),
    ),
    ToolFormat(
        "pythonic",
        (PythonCall(),),
        opens=("<|python_tag|>",),
        skips=LIST,
        bare="[",
        only_known=True,
        opening="[",
        separator=", ",
        closing="]",
        evidence=(("func_name1(",),),
    ),
    ToolFormat(
        "llama3_json",
        (JsonCall(("name",), ("parameters", "arguments")),),
        opens=("<|python_tag|>",),
        skips=(*LIST, ";"),
        bare="{",
        only_known=True,
        separator="; ",
        evidence=(("<|python_tag|>",), ('"parameters": dictionary',)),
        aliases=("llama4_json",),
    ),
    ToolFormat(
        "hunyuan_dense",
        (HeadedJson("<tool_call>", HUNYUAN_HEAD, "{name}\n```json\n"), JsonCall()),
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        skips=(*LIST, "```", "</tool_call>"),
        opening="<tool_calls>",
        separator="\n```</tool_call>\n",
        closing="\n```</tool_call></tool_calls>",
        evidence=(("<tool_calls><tool_call>", "```json"),),
    ),
    ToolFormat(
        "hunyuan_a13b",
        (JsonCall(),),
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        skips=LIST,
        opening="<tool_calls>[",
        separator=", ",
        closing="]</tool_calls>",
        evidence=(("<tool_calls>", "<answer>"),),
    ),
    ToolFormat(
        "minimax",
        (JsonCall(),),
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        skips=LIST,
        opening="<tool_calls>\n",
        closing="\n</tool_calls>",
        evidence=(("<tool_calls>", "<beginning_of_sentence>"),),
    ),
    ToolFormat(
        "apriel",
        (JsonCall(),),
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        skips=LIST,
        opening="<tool_calls>[",
        separator=", ",
        closing="]</tool_calls>",
        evidence=(("<tool_calls>", "[BEGIN FINAL RESPONSE]"),),
    ),
    ToolFormat(
        "jamba",
        (JsonCall(),),
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        skips=LIST,
        opening="<tool_calls>[\n    ",
        separator=",\n    ",
        closing="\n]</tool_calls>",
        evidence=(("<tool_calls>",),),
    ),
    ToolFormat(
        "ernie45",
        (JsonCall(),),
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        opening="<tool_call>\n",
        closing="\n</tool_call>",
        each=True,
        evidence=(("<tool_call>", "<response>"),),
    ),
    ToolFormat(
        "xlam",
        (JsonCall(),),
        opens=("[TOOL_CALLS]", "<tool_call>", "```json", "```"),
        closes=("</tool_call>", "```"),
        skips=LIST,
        bare="[{",
        only_known=True,
        opening="[",
        separator=", ",
        closing="]",
        evidence=(("calls in a single JSON array",),),
    ),
    ToolFormat(
        "hermes",
        (JsonCall(),),
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        opening="<tool_call>\n",
        closing="\n</tool_call>",
        each=True,
        evidence=(("<tool_call>",),),
        aliases=("granite4", "qwen3"),
    ),
    ToolFormat(
        "json",
        (JsonCall(),),
        opens=("```json",),
        closes=("```",),
        skips=(*LIST, ";"),
        bare="[{",
        only_known=True,
        separator="\n",
        aliases=("generic_json",),
    ),
)

TOOL_FORMATS: PluginTable[ToolFormat] = PluginTable(
    "quire.tool_formats",
    "--tool-call-parser",
    {name: row for row in FORMATS for name in (row.name, *row.aliases)},
    instance_of(ToolFormat),
    words=("auto", "none"),
)
