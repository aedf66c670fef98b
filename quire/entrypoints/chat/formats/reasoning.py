# SPDX-License-Identifier: Apache-2.0
"""Table of reasoning formats, named as in vLLM's `--reasoning-parser`, and the counter of reasoning tokens.

Templates are matched in table order, so more specific formats come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from quire.entrypoints.chat.formats.format import ReasoningFormat
from quire.plugins import PluginTable, instance_of

TokenIds = tuple[int, ...]


class ReasoningCounter:
    """Incremental counter of the tokens between the markers of an answer's reasoning.

    Markers that are several tokens are matched as the tokenizer encodes them. A call marker may be a mention or end the
    reasoning, depending on the following text; tokens after one are counted once that is known.

    Args:
        opens, closes: token ids of each marker.
        calls: token ids of each call marker, if calls end the reasoning.
        is_open: the answer begins inside of the reasoning.
    """

    def __init__(
        self,
        opens: Sequence[TokenIds],
        closes: Sequence[TokenIds],
        calls: Sequence[TokenIds] = (),
        *,
        is_open: bool,
    ) -> None:
        self._opens = opens
        self._calls = calls
        self._markers = [marker for marker in (*opens, *closes, *calls) if marker]
        self._last_ids = {marker[-1] for marker in self._markers}
        self._longest = max(map(len, self._markers), default=1)
        self._last: TokenIds = ()
        self._num_read = 0
        # Reasoning tokens without those since `_begin`, which is None outside of reasoning.
        self._counted = 0
        self._begin: int | None = 0 if is_open else None
        # Markers and their positions; the first one is undecided.
        self._unread: deque[tuple[TokenIds, int]] = deque()
        self._num_resolved = 0

    @property
    def num_tokens(self) -> int:
        """Number of reasoning tokens, as far as it is certain."""
        if self._begin is None:
            return self._counted
        return self._counted + (self._unread[0][1] if self._unread else self._num_read) - self._begin

    def add(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens."""
        for token_id in token_ids:
            self._num_read += 1
            self._last = (*self._last, token_id)[-self._longest :]
            if token_id in self._last_ids:
                self._find()

    def _find(self) -> None:
        marker = next((one for one in self._markers if self._last[-len(one) :] == one), ())
        if marker:
            self._unread.append((marker, self._num_read - len(marker)))

    def resolve(self, call_markers: Sequence[bool]) -> None:
        """Resolve the call markers inside of reasoning (`AnswerReader.call_markers`)."""
        while self._unread:
            marker, place = self._unread[0]
            if marker in self._calls and self._begin is not None:
                if self._num_resolved == len(call_markers):
                    return
                self._num_resolved += 1
                if call_markers[self._num_resolved - 1]:
                    self._close(place)
            elif marker in self._opens:
                self._open(place, len(marker))
            elif self._begin is not None:
                self._close(place)
            self._unread.popleft()

    def _open(self, place: int, num_tokens: int) -> None:
        if self._begin is None:
            self._begin = place + num_tokens
        else:  # a repeated marker
            self._counted -= num_tokens

    def _close(self, place: int) -> None:
        assert self._begin is not None
        self._counted += place - self._begin
        self._begin = None


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
