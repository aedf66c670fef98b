# SPDX-License-Identifier: Apache-2.0
"""Short conversations by which a chat template is probed, when it is loaded and before its first use of a form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template

from quire.entrypoints.chat.environment import TemplateRefusalError
from quire.entrypoints.chat.tool_places import PROBE_MESSAGES, PROBE_TOOL, ToolPlace
from quire.inputs import ChatMessage

PROBE = "quire probes the content format"
NO_OPTIONS: Mapping[str, Any] = {}


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    if isinstance(message["content"], list):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


class TemplateProbes:
    """Base of `ChatTemplate` with its probes; the derived class sets the attributes."""

    _template: Template
    _tokens: dict[str, str]
    _wants_parts: bool

    def probe(self, options: Mapping[str, Any]) -> str | None:
        """Return the prompt of a short conversation with these options; None if the template fails."""
        try:
            return self._run_bare(
                [{"role": "user", "content": PROBE}], {**options, "add_generation_prompt": True}
            )
        except Exception:  # untrusted template code may fail for any value; then nothing is known
            return None

    def _find_media_part(self, marker: str, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the content part for which the template writes a marker; None if it takes texts only."""
        for part in parts:
            content = [part, {"type": "text", "text": PROBE}]
            context = {**self._tokens, "messages": [{"role": "user", "content": content}]}
            try:
                rendered = self._template.render(context)
            except Exception:  # untrusted template code; its failure is the answer
                continue
            if rendered.count(marker) == 1 and PROBE in rendered:
                return part
        return None

    def _may_show(self, role: str, before: list[ChatMessage], after: list[ChatMessage]) -> bool:
        """Return False if the template rejects or omits a message of this role there."""
        try:
            return PROBE in self._run_bare([*before, {"role": role, "content": PROBE}, *after])
        except TemplateRefusalError:
            return False
        except Exception:  # untrusted code may fail for the probe only, for example without tools
            return True

    def _distinguishes(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether replacing one message by the other may change the prompt."""
        before = [] if one["role"] in ("user", "system", "developer") else [{"role": "user", "content": "x"}]
        try:
            prompts = [self._run_bare([*before, message]) for message in (one, other)]
        except Exception:  # untrusted template code may reject both; then nothing is known
            return True
        return prompts[0] != prompts[1]

    def _run_bare(self, messages: list[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS) -> str:
        messages = [with_parts(message) for message in messages] if self._wants_parts else messages
        return self._template.render({**self._tokens, **options, "messages": messages})

    def _shows_tools(self, place: ToolPlace, name: str) -> bool:
        """Return whether a tool at this place appears in the prompt."""
        messages, options = place.put(PROBE_MESSAGES, {"tools": [PROBE_TOOL]})
        try:
            return name in self._run_bare(messages, options)
        except Exception:  # untrusted template code; its failure is the answer
            return False

    def _shows(self, content: Any) -> bool:
        """Return whether a user message's content is shown as text, without its structure."""
        context = {**self._tokens, "messages": [{"role": "user", "content": content}]}
        try:
            rendered = self._template.render(context)
        except Exception:  # untrusted template code; its failure is the answer
            return False
        return PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered
