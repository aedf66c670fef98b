"""The table of reasoning formats, and of markers around what is said; names as in vLLM's `--reasoning-parser`.

A template is asked for evidence in the order of the table, so what is more particular stands first.
"""

from __future__ import annotations

from quire.entrypoints.chat.formats.format import ReasoningFormat
from quire.plugins import PluginTable, instance_of

FORMATS = (
    ReasoningFormat(
        "openai_gptoss",
        opens=("<|channel|>analysis<|message|>",),
        closes=("<|end|>",),
        evidence=(("<|channel|>", "analysis"),),
        aliases=("gpt_oss",),
    ),
    ReasoningFormat(
        "cohere_command3",
        opens=("<|START_THINKING|>",),
        closes=("<|END_THINKING|>",),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ends_at_calls=True,
        evidence=(("<|START_THINKING|>",), ("<|START_RESPONSE|>",)),
        aliases=("command_r", "cohere_command4"),
    ),
    ReasoningFormat(
        "seed_oss",
        opens=("<seed:think>",),
        closes=("</seed:think>",),
        ends_at_calls=True,
        evidence=(("<seed:think>",),),
    ),
    ReasoningFormat(
        "hyperclovax",
        opens=("<|im_start|>assistant/think", "/think\n"),
        closes=("<|im_end|>",),
        silent=("<|im_start|>assistant", "<|im_end|>"),
        evidence=(("assistant/think", "<|im_end|>"),),
    ),
    ReasoningFormat(
        "plamo3",
        opens=("<|plamo:begin_think:plamo|>",),
        closes=("<|plamo:end_think:plamo|>",),
        ends_at_calls=True,
        evidence=(("<|plamo:begin_think:plamo|>",), ("plamo:begin_", "think")),
    ),
    ReasoningFormat("exaone", opens=("<thought>",), closes=("</thought>",), evidence=(("</thought>",),)),
    ReasoningFormat("mistral", opens=("[THINK]",), closes=("[/THINK]",), evidence=(("[THINK]",),)),
    ReasoningFormat(
        "granite",
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
        evidence=(("Here is my thought process:",), ("Here's my thought process:",)),
    ),
    ReasoningFormat(
        "gemma4",
        opens=("<|channel>thought",),
        closes=("<channel|>",),
        ends_at_calls=True,
        evidence=(("<|channel>thought",),),
    ),
    ReasoningFormat(
        "kimi_k3",
        opens=("<|open|>think<|sep|>",),
        closes=("<|close|>think<|sep|>",),
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        evidence=(("<|open|>", "open_tag('think'"), ("<|open|>think<|sep|>",)),
    ),
    ReasoningFormat(
        "solar_open",
        opens=("<|think|>",),
        closes=("<|end|>",),
        silent=("<|begin|>assistant", "<|content|>"),
        evidence=(("<|begin|>assistant", "<|think|>"),),
    ),
    ReasoningFormat(
        "apertus",
        opens=("<|inner_prefix|>",),
        closes=("<|inner_suffix|>",),
        ends_at_calls=True,
        evidence=(("<|inner_prefix|>",),),
    ),
    ReasoningFormat(
        "apriel",
        opens=("Here are my reasoning steps:",),
        closes=("[BEGIN FINAL RESPONSE]",),
        silent=("[END FINAL RESPONSE]",),
        ends_at_calls=True,
        evidence=(("[BEGIN FINAL RESPONSE]",),),
    ),
    ReasoningFormat(
        "minimax_m3",
        opens=("<mm:think>",),
        closes=("</mm:think>",),
        ends_at_calls=True,
        evidence=(("<mm:think>",),),
    ),
    ReasoningFormat(
        "hy_v3",
        opens=("<think:opensource>", "<think>"),
        closes=("</think:opensource>", "</think>"),
        ends_at_calls=True,
        evidence=(("<think", ":opensource"), ("<tool_sep", "<arg_key", "<think")),
    ),
    ReasoningFormat(
        "minicpm3",
        opens=("<|thought_start|>",),
        closes=("<|thought_end|>",),
        evidence=(("<|thought_start|>",),),
    ),
    ReasoningFormat(
        "muse_glimmer",
        opens=(" to=self<|message|>",),
        closes=("<|eom|>",),
        silent=(" to=user<|message|>", "<|start|>assistant", "<|message|>", "<|eom|>"),
        heads=" to={name}<|message|>",
        evidence=(("to=self<|message|>", "<|eom|>"),),
    ),
    ReasoningFormat("functionary_v32", (), (), silent=(">>>all\n",), evidence=((">>>all",),)),
    ReasoningFormat("minimax_m2", ends_at_calls=True, evidence=(("minimax:tool_call", "<think>"),)),
    ReasoningFormat("hunyuan_a13b", silent=("<answer>", "</answer>"), evidence=(("</think>", "<answer>"),)),
    ReasoningFormat("ernie45", silent=("<response>", "</response>"), evidence=(("</think>", "<response>"),)),
    ReasoningFormat(
        "kimi_k2",
        opens=("<think>", "◁think▷"),
        closes=("</think>", "◁/think▷"),
        ends_at_calls=True,
        evidence=(("<|tool_calls_section_begin|>", "think>"), ("◁think▷",)),
    ),
    ReasoningFormat(
        "deepseek_r1",
        starts_open=True,
        evidence=(("<｜Assistant｜>", "</think>"),),
        aliases=("deepseek_v3", "deepseek_v4"),
    ),
    ReasoningFormat(
        "glm45",
        ends_at_calls=True,
        evidence=(("<arg_key>", "<think>"),),
        aliases=("glm47", "poolside_v1", "ling3"),
    ),
    ReasoningFormat("olmo3", evidence=(("<function_calls>", "<think>"),)),
    ReasoningFormat(
        "qwen3",
        evidence=(("<|im_start|>", "<think>"), ("<|im_start|>", "</think>")),
        aliases=("nemotron_v3", "mimo", "step3p5"),
    ),
    ReasoningFormat("think", evidence=(("<think>",), ("</think>",))),
)

REASONING_FORMATS: PluginTable[ReasoningFormat] = PluginTable(
    "quire.reasoning_formats",
    "--reasoning-parser",
    {name: row for row in FORMATS for name in (row.name, *row.aliases)},
    instance_of(ReasoningFormat),
    words=("auto", "none"),
)
