# SPDX-License-Identifier: Apache-2.0
"""JSON Schema formats as regular expressions, so that they are enforced exactly.

Invariant: an expression matches what the format's RFC allows and nothing else, except leap seconds, allowed if the
time is in UTC, and year 0, not allowed. Formats of the standard that are missing here are refused; unknown formats are
ignored (JSON Schema 2020-12, validation, 7.2.3).
"""

from __future__ import annotations

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = "(?:[.][0-9]+)?"
TIME = f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[-+]{_HOUR_MINUTE})|23:59:60{_FRACTION}(?:[Zz]|[-+]00:00))"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = f"(?:{_OCTET}[.]){{3}}{_OCTET}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{IPV4})"


def _ipv6() -> str:
    """Return RFC 3986, section 3.2.2: the allowed numbers of groups before and after the two colons."""
    before = ["", f"(?:{_H16})?", *(f"(?:(?:{_H16}:){{0,{count}}}{_H16})?" for count in range(1, 7))]
    behind = [*(f"(?:{_H16}:){{{count}}}{_LS32}" for count in range(5, 0, -1)), _LS32, _H16, ""]
    pairs = [f"{left}::{right}" for left, right in zip(before, behind, strict=True)]
    return f"(?:(?:{_H16}:){{6}}{_LS32}|{'|'.join(pairs)})"


IPV6 = _ipv6()
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\u{5b}\u{5d}-~]|\u{5c}[ -~])*"'
_DOMAIN = f"(?:{_LABEL}(?:[.]{_LABEL})*|\\u{{5b}}(?:{IPV4}|IPv6:{IPV6})\\u{{5d}})"
EMAIL = f"(?:{_ATOM}(?:[.]{_ATOM})*|{_QUOTED})@{_DOMAIN}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

AS_PATTERN = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[Tt]{TIME}",
    "ipv6": IPV6,
    "email": EMAIL,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Format -> expression in Rust's syntax for the whole string."""

LIBRARY = frozenset({"duration", "hostname", "ipv4", "uuid", "uri"})
"""Formats that the grammar library enforces as the standard defines them."""

REFUSED = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template"}
)
"""Formats of the standard that are not enforced, and so refused."""
