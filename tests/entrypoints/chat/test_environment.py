# SPDX-License-Identifier: Apache-2.0
"""Tests of template limits: a result is bounded before it is built, to protect memory and the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from jinja2 import Environment

from quire.entrypoints.chat.environment import MAX_SIZE, TemplateRefusalError, make_environment, weigh
from tests.fixtures.folded import folded

GROWING = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(100000) %}}{{% set ns.x = {1} %}}{{% endfor %}}{2}"
)
MANY = "{% set long = 'x' * 30000000 %}{% set many = [long ~ 'z'] * 400000 %}"
BIG = "{% set big = 'a' * 4000000 %}"
NASTY = [
    "{{ 9 ** 9 ** 999 }}",
    "{{ 9**(9**9) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 'a'*1000000000 }}",
    "{{ 10 ** 9 * [1, 2] }}",
    "{{ [[]] * 10 ** 9 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    BIG + "{{ ('%s' * 1000) % ([big] * 1000) }}",
    BIG + "{{ ('%(a)s' * 1000) % {'a': big} }}",
    BIG + "{{ ('%(a)s' * 1000) | format(a=big) }}",
    "{{ 'a' | center(2 * 10**9) }}",
    "{{ ['a'] | map('center', 2 * 10**9) | list }}",
    "{{ 'a'.center(2000000000) }}",
    "{{ 'a'.ljust(2000000000) }}",
    "{{ 'a'.rjust(width=2000000000) if false else 'a'.rjust(2000000000) }}",
    "{{ 'a'.zfill(2000000000) }}",
    "{{ '\\t'.expandtabs(2000000000) }}",
    "{{ ('a' | attr('center'))(2000000000) }}",
    "{{ 'a'['center'](2000000000) }}",
    BIG + "{{ big.replace('a', big) }}",
    BIG + "{{ big | replace('a', big) }}",
    BIG + "{{ big.join(big) }}",
    BIG + "{{ range(100000) | join(big) }}",
    BIG + "{{ big.translate({97: big}) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{a:{w}}'.format_map({'a': 1, 'w': 999999999}) }}",
    "{{ '{:{a[w]}}'.format(1, a={'w': 999999999}) }}",
    BIG + "{{ ('{0}' * 1000).format(big) }}",
    "{{ ('a\\n' * 100000) | indent(1000000) }}",
    BIG + "{{ ('a\\n' * 100000) | indent(big) }}",
    BIG + "{{ big | wordwrap(1, true, big) }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    "{{ [[1]] | tojson(10 ** 9) }}",
    BIG + "{{ [[1]] | tojson(indent=big) }}",
    BIG + "{{ ([1] * 1000) | tojson(separators=(big, big)) }}",
    BIG + "{{ ([big] * 1000) | tojson }}",
    BIG + "{{ range(100000) | map(attribute='none') | map('default', big) | list | string }}",
    BIG + "{{ range(100000) | map(attribute='none') | map('default', big) | list }}",
    BIG + "{{ range(100000) | map(attribute='none') | map('default', big) | join }}",
    BIG + "{% set x = range(100000) | map(attribute='none') | map('default', big) | list %}{{ x ~ '' }}",
    BIG + "{{ [big, big, big] | sum(start='') if false else ([big] * 8 + [big] * 8) | sum(start='') }}",
    GROWING.format("3", "ns.x * ns.x", ""),
    GROWING.format("'a'", "ns.x + ns.x", ""),
    GROWING.format("'a'", "ns.x ~ ns.x", ""),
    GROWING.format("[1]", "ns.x + ns.x", ""),
    GROWING.format("[]", "[ns.x, ns.x]", "{{ ns.x }}"),
    GROWING.format("[]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x }}"),
    GROWING.format("[]", "(ns.x, ns.x)", "{{ ns.x == ns.x }}"),
    GROWING.format("[]", "dict(a=ns.x, b=ns.x)", "{{ ns.x }}"),
    GROWING.format("[]", "namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"),
    GROWING.format("[]", "cycler(ns.x, ns.x).items", "{{ ns.x }}"),
    GROWING.format("[]", "ns.x + ['a' * 1000000]", ""),
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROWING.format("'a'", "m(ns.x)", ""),
    "{{ (('f' * 4000000) | int(base=16)) // (('f' * 2000000) | int(base=16)) }}",
    "{{ (('f' * 4000000) | int(base=16)) % (('f' * 2000000) | int(base=16)) }}",
    "{{ lipsum(n=10 ** 9) }}",
    MANY + "{{ (long ~ 'y') in many }}",
    MANY + "{{ many == ([long ~ 'y'] * 400000) }}",
    MANY + "{{ (long ~ 'y') is in(many) }}{{ long is eq(many) }}",
    MANY + "{{ many | unique | list }}",
    MANY + "{{ many | sort | length }}",
    "{{ ([[0] * 250000] * 250000) | map('list') | list | length }}",
]
LOOPS = [
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(100000) %}{% for j in range(100000) %}xxx{% endfor %}{% endfor %}{% endset %}",
    BIG + "{{ big | join(big) }}",
]
"""These end when the budget does, after a second or two."""
PROGRAM = """
import json, resource, sys, time
from quire.entrypoints.chat.environment import make_environment

limit = 2 ** 29 + int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for source in json.load(sys.stdin):
    started = time.process_time()
    try:
        make_environment().from_string(source).render()
        how = "rendered"
    except BaseException as error:
        how = type(error).__name__
    print(json.dumps([how, time.process_time() - started]), flush=True)
"""


@pytest.mark.item(16)
@pytest.mark.parametrize(
    "sources", [NASTY, pytest.param(LOOPS, marks=pytest.mark.more)], ids=["at once", "loops"]
)
def test_nothing_large_is_built_and_nothing_takes_long(sources: list[str]) -> None:
    """In a process that may not have half a gigabyte more than it begins with."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(sources), capture_output=True, text=True, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    ends = {source: how for source, (how, _) in zip(sources, results, strict=True)}
    refusals = {
        "TemplateRefusalError",
        "UndefinedError",
        "SecurityError",
        "RecursionError",
        "ValueError",
        "TypeError",
    }
    assert {source: how for source, how in ends.items() if how not in refusals} == {}
    assert {source: s for source, (_, s) in zip(sources, results, strict=True) if s > 10} == {}


@folded("source", NASTY[:6])
def test_constants_are_not_computed_while_a_template_is_compiled(source: str) -> None:
    started = time.process_time()
    template = make_environment().from_string(source)
    with pytest.raises(TemplateRefusalError, match="exceeds the output limit"):
        template.render()
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 2 ** 10 }} {{ 3 * 4 }} {{ 1.5 * 2 }} {{ 7 % 4 }}", "1024 12 3.0 3"),
        ("{{ '-' * 3 }}{{ 2 * [1] }}", "---[1, 1]"),
        ("{{ '%s is %05.1f %%' % ('a', 2.5) }}", "a is 002.5 %"),
        ("{{ '%s %(b)s' | format(b=1) if false else '%s' | format('x') }}", "x"),
    ],
)
def test_common_template_code_renders_in_the_sandbox(source: str, text: str) -> None:
    assert make_environment().from_string(source).render() == text


@folded(
    "source",
    [
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ missing }}",
        "{{ [1, 'a', missing, none] | join(', ') }}{{ [{'a': 1}, {'a': 2}] | join('-', attribute='a') }}",
        "{{ 'abc' | join }}{{ [1, 2, 3] | sum }}{{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }}",
        "{{ 'ab' | center(9) }}|{{ 7 | center }}|{{ 'ab'.center(7, '*') }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}",
        "{{ 'a\nb\n\nc' | indent }}{{ 'a\nb' | indent(2, true) }}{{ 'a\n\nb' | indent('> ', blank=true) }}",
        "{{ 'the quick brown fox' | wordwrap(9) }}{{ 'abcdefgh' | wordwrap(3, wrapstring='/') }}",
        "{{ 'aXbXc' | replace('X', 'y') }}{{ 'aXbXc' | replace('X', 'y', 1) }}{{ 121 | replace('1', 'z') }}",
        "{{ 'aXbXc'.replace('X', 'yy', 1) }}{{ ','.join(['a', 'b']) }}{{ 'a,b'.split(',') }}{{ 'a\tb'.expandtabs(4) }}",
        "{{ [[1], [2]] | sum(start=[]) }}{{ [] | sum }}",
        "{{ [3, 1, 2] | sort(reverse=true) }}{{ 'bAa' | unique | list }}{{ [2, 1] | min }}{{ 'ab' | max }}",
        "{% for k, v in [{'a': 1}, {'a': 2}] | groupby('a') %}{{ k }}{{ v }}{% endfor %}",
        "{{ {'b': 1} | dictsort(by='value') }}{{ 1 is lt 2 }}{{ [] | min }}",
        "{{ 1 < 2 < 3 }}{{ [1] == [1] }}{{ 'a' in {'a': 1} }}{{ 2 not in (1, 2) }}{{ 1 is in [1] }}{{ missing == '' }}",
        "{{ [1, 2] | select('in', [2]) | list }}{{ [1, 2] | reject('eq', 2) | list }}{{ [1, 2] is eq [1, 2] }}",
        "{{ [{'a': 1}] | selectattr('a', '==', 1) | list }}{{ ['a'] | map('upper') | list }}{{ 'ab' | list | length }}",
        "{{ range(5) | batch(2) | list }}{{ range(5) | batch(2, 'x') | list }}{{ range(7) | slice(3) | list }}",
        "{{ range(7) | slice(3, 'x') | list }}{{ (1, 2) }}{{ {'a': [1, {'b': 2}]} }}{{ [] + [1] }}{{ 'a' + 'b' }}",
        "{{ '{} {:>5} {a}'.format(1, 'x', a=2) }}{{ '{a}'.format_map({'a': 3}) }}",
        "{{ '{:>{w}}'.format('x', w=4) }}{{ 'abc'.translate({97: 'x'}) }}",
        "{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}{{ a }}{{ b }}{% else %}none{% endfor %}{{ 1 in [1, 2] }}",
        "{% for item in [1, [2, [3]]] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}",
        "{% set x %}a{{ 1 }}{% endset %}{{ x * 2 }}{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1, b=3) }}",
        "{% set ns = namespace(a=1, l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l }}",
        "{{ dict(a=1).items() | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 10 // 3 }}{{ -7 // 2 }}{{ 2 ** -1 }}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ 5 | string }}{{ none | string }}",
        "{% for i in range(3) if i != 1 %}{{ i }}{{ '' if loop.last else ',' }}{% endfor %}{{ missing }}{{ 'a' % () }}",
    ],
)
def test_within_the_budget_all_is_as_jinja_has_it(source: str) -> None:
    plain = Environment(trim_blocks=True, lstrip_blocks=True)
    assert make_environment().from_string(source).render() == plain.from_string(source).render()


def test_json_is_plain_and_in_any_of_its_forms() -> None:
    render = make_environment().from_string
    value = {"b": ["ü", 1.5, None, True, {}], "a": {"<": "\n"}}
    for options in (
        {},
        {"indent": 4},
        {"sort_keys": True},
        {"separators": (",", ":")},
        {"indent": 1, "sort_keys": True},
    ):
        shown = ", ".join(f"{name}={given!r}" for name, given in options.items())
        text = render(f"{{{{ value | tojson({shown}) }}}}").render(value=value)
        assert text == json.dumps(value, ensure_ascii=False, **options)


def test_a_long_conversation_is_far_from_the_limits() -> None:
    source = (
        "{% set ns = namespace(text='', found=[]) %}{% for m in messages %}{% for other in messages %}{% endfor %}"
        "{% set ns.text = ns.text ~ '<' + m.role + '>' + m.content | trim + '\n' %}{% set ns.found = ns.found + [m] %}"
        "{% endfor %}{{ ns.text }}{{ messages | tojson | length }}"
    )
    messages = [{"role": "user", "content": "x" * 300}] * 1000
    text = make_environment().from_string(source).render(messages=messages)
    assert text.startswith(("<user>" + "x" * 300 + "\n") * 1000)


def test_self_containing_value_is_measured_up_to_the_limit() -> None:
    value: object = "a"
    for _ in range(100):
        value = [value, value]
    assert weigh(value) > MAX_SIZE
    assert weigh([1, "abc", {"a": ("b",)}]) < 2000
