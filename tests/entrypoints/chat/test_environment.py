"""No single operator of a template keeps the interpreter busy, so that what loops can be interrupted."""

from __future__ import annotations

import time

import pytest

from quire.entrypoints.chat.environment import TemplateRefusalError, make_environment


@pytest.mark.item(16)
@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** 9 ** 999 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1, 2] }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(1000) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_an_operator_that_makes_too_much_is_refused_at_once(source: str) -> None:
    started = time.process_time()
    with pytest.raises(TemplateRefusalError, match="makes too much"):
        make_environment().from_string(source).render()
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
def test_what_templates_do_goes_on_working(source: str, text: str) -> None:
    assert make_environment().from_string(source).render() == text
