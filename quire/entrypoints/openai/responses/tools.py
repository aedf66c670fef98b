# SPDX-License-Identifier: Apache-2.0
"""Tools of the Responses API: mapping between the client's tools and the function names shown to the model.

Invariant: function names are distinct, and every call maps to one tool of the client. Names depend on the tools alone,
so they are stable over the turns of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.responses.protocol import MAX_PART_CHARS
from quire.entrypoints.openai.tool_choice import custom_function, grammar_of
from quire.errors import ValidationError

FUNCTION = ("name", "description", "parameters", "strict")
KINDS = ("function", "custom")
SEPARATOR = "__"
JOINTS = (SEPARATOR, ".", "/", ":")  # Separators that models write between a namespace and a name.
Fields = dict[str, Any]


class ClientTool(NamedTuple):
    """A tool as the client named it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class _Described(NamedTuple):
    tool: Fields
    place: str
    namespace: str | None = None
    about: str = ""


class ResponseTools:
    """The tools of one request.

    Args:
        tools: as the client describes them.
        notes: receives the ignored ones.

    Raises:
        ValidationError: a function, custom tool or namespace is incomplete.
    """

    def __init__(self, tools: Sequence[Fields], notes: RequestNotes) -> None:
        # Tools of the chat request at the client's indices; further members of a namespace come last.
        self.chat: list[Fields] = [{"type": _kind(tool, f"tools.{i}")} for i, tool in enumerate(tools)]
        # Paths of chat's tools -> paths of the client's, where they differ.
        self.chat_names: dict[str, str] = {}
        self._notes = notes
        self._shown: dict[str, ClientTool] = {}
        self._names: dict[tuple[str, str | None], str] = {}
        for index, tool in enumerate(tools):
            if tool["type"] in KINDS:
                self._add(_described(tool, f"tools.{index}"), index)
        for index, tool in enumerate(tools):  # last, so that they do not change other tools' names
            if tool["type"] == "namespace":
                for described in self._members(tool, f"tools.{index}"):
                    self._add(described, index)

    def shown_name(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool, even of one that is no longer in the request."""
        return self._names.get((name, namespace)) or _joined(name, namespace)

    def names_in(self, namespace: str) -> list[str]:
        """Return the model's names of all tools of a namespace."""
        return [name for name, tool in self._shown.items() if tool.namespace == namespace]

    def name_of(self, name: str) -> str:
        """Return the model's name of a tool, given any form of its name."""
        tool = self.called(name)
        return self.shown_name(tool.name, tool.namespace)

    def called(self, name: str) -> ClientTool:
        """Return the tool that the model called, given any form of its name."""
        if name in self._shown:
            return self._shown[name]
        forms = {
            f"{tool.namespace}{joint}{tool.name}": tool
            for tool in self._shown.values()
            for joint in JOINTS
            if tool.namespace is not None
        }
        named = [tool for tool in self._shown.values() if tool.name == name]
        return forms.get(name) or (named[0] if len(named) == 1 else ClientTool(name))

    def _members(self, tool: Fields, where: str) -> Iterator[_Described]:
        """Yield the functions and custom tools of a namespace; the first carries the namespace's description."""
        about = _described(tool, where, in_namespace=True).tool.get("description") or ""
        members = tool.get("tools", [])
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise ValidationError(f"{where}.tools must be a list of tools", param=f"{where}.tools")
        for index, member in enumerate(members):
            place = f"{where}.tools.{index}"
            kind = _kind(member, place)
            if kind not in KINDS:
                self._notes.ignore(f"tools[].tools[].{kind}")
                continue
            yield _described(member, place, in_namespace=True)._replace(namespace=tool["name"], about=about)
            about = ""

    def _add(self, described: _Described, index: int) -> None:
        tool, place, namespace, about = described
        client = ClientTool(tool["name"], namespace, tool["type"] == "custom")
        if namespace is not None and (client.name, namespace) in self._names:
            raise ValidationError(
                f"{place}.name {client.name!r:.80} is already used in this namespace", param=f"{place}.name"
            )
        shown = client.name if namespace is None else self._unused(_joined(client.name, namespace))
        self._shown.setdefault(shown, client)
        self._names.setdefault((client.name, namespace), shown)
        if (
            namespace is not None and self.chat[index]["type"] != "namespace"
        ):  # its first member has the place
            index = len(self.chat)
            self.chat.append({})
        function = {**self._function(tool), "name": shown}
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        self.chat[index] = {"type": "function", "function": function}
        if namespace is not None:
            self.chat_names[f"tools.{index}.function"] = place

    def _function(self, tool: Fields) -> Fields:
        if tool["type"] == "function":
            return {name: tool[name] for name in FUNCTION if name in tool}
        if grammar_of(tool.get("format")) is not None:
            self._notes.ignore("tools[].format")
        return custom_function(tool["name"], tool.get("description"), tool.get("format"))

    def _unused(self, name: str) -> str:
        number, free = 1, name
        while free in self._shown:
            number += 1
            free = f"{name}_{number}"
        return free


def _described(tool: Fields, where: str, *, in_namespace: bool = False) -> _Described:
    """Check the fields of a named tool and return it."""
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ValidationError(f"{where}.name must be text", param=f"{where}.name")
    if in_namespace and len(tool["name"]) > MAX_PART_CHARS:
        raise ValidationError(
            f"{where}.name has {len(tool['name'])} characters, the limit is {MAX_PART_CHARS}",
            param=f"{where}.name",
        )
    if not isinstance(tool.get("description"), str | None):
        raise ValidationError(f"{where}.description must be text", param=f"{where}.description")
    if not isinstance(tool.get("format"), dict | None):
        raise ValidationError(f"{where}.format must be an object", param=f"{where}.format")
    return _Described(tool, where)


def _kind(tool: Fields, where: str) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str) or not kind:
        raise ValidationError(f"{where}.type must be text", param=f"{where}.type")
    return kind


def _joined(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"
