# SPDX-License-Identifier: Apache-2.0
"""Generator of docs/coming_from_vllm.md from the tables: `python -m quire.vllm_names.page [FILE]`.

Invariant: the page is a function of the tables and the text here; a test compares.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from quire.vllm_names.bench_options import BENCH_OPTIONS
from quire.vllm_names.environment import ENVIRONMENT
from quire.vllm_names.imports import ABSENT, ALL, PRESENT
from quire.vllm_names.members import MEMBERS
from quire.vllm_names.option_values import OPTION_VALUES
from quire.vllm_names.options import OPTIONS
from quire.vllm_names.parameters import PARAMETERS
from quire.vllm_names.row import Fate, NameRow, Table, flag_of
from quire.vllm_names.server_options import SERVER_OPTIONS

PAGE = Path("docs/coming_from_vllm.md")

INTRODUCTION = """\
# Coming from vLLM

This page is generated: `python -m quire.vllm_names.page`.

Replace `vllm` by `quire`: the command, the imports, the names of options, sampling parameters, outputs, routes and
metrics (`--metrics-compat vllm`) are vLLM's where quire has the same thing. A name of the tables below is accepted,
translated, or refused with the sentence that stands here. What is accepted or translated is logged once. A name in
neither quire nor the tables is an error, with a suggestion only if one is close in spelling.

```python
from dataclasses import asdict

from quire import LLM, SamplingParams
from quire.engine.arg_utils import EngineArgs

llm = LLM(**asdict(EngineArgs(model="quire-demo", trust_remote_code=True, max_model_len=256)))
prompt = llm.get_tokenizer().apply_chat_template(
    [{"role": "user", "content": "What is the capital of France?"}],
    tokenize=False,
    add_generation_prompt=True,
)
print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text)
```

What differs:

- **Remote code** is never run, whatever `trust_remote_code` says: models are quire's own, or those of the installed
  transformers.
- **Weights** are quantized while they are loaded by `quantization="int8"` or `"int4"`. A quantized checkpoint needs no
  option; `quantization="awq"` and the like are compared with it.
- **Results** do not depend on the batch (on a GPU with `--batch-invariant`), so a seed reproduces a text.
- **Ranges**: `temperature` is in [0, 2], `n` at most 128. A parameter out of range is an error with its name.
- **`SamplingParams` are immutable**: `clone(temperature=0.1)` returns a changed copy.
- **The tokenizer** is quire's own. It has `encode`, `decode` and `apply_chat_template`; `decode` skips special tokens
  unless `skip_special_tokens` is False. `transformers.AutoTokenizer` has the rest.
- **`LLM.get_metrics`** needs `disable_log_stats=False`; **`LLM.collective_rpc`** and **`apply_model`** reach the worker
  of one rank, which is in the same process; methods of `worker_extension_cls` are called on every rank.
- **`AsyncLLM.is_sleeping`** is a property, and `shutdown()` may be awaited or not.
- **Drafts** of `speculative_config` never change a text, at any temperature.
- **Unknown fields** of requests are ignored and named in the reply, or refused with `--unknown-fields reject`.

Command lines are read as vLLM reads them: `_` for `-`, keys of JSON options behind a dot
(`--speculative-config.method ngram`), several values behind one flag (`--served-model-name a b`, behind the model),
lists and adapters in JSON, `-O3`.
"""

_HEAD = "| {} | in quire | reason, or what to do |\n|---|---|---|\n"


def vllm_page() -> str:
    """Return the text of docs/coming_from_vllm.md."""
    return "".join(
        (
            INTRODUCTION,
            "\n## Engine options\n\nKeywords of `LLM(...)` and `EngineArgs(...)`, flags, and keys of `--config`.\n\n",
            _table("flag", OPTIONS, _as_flag),
            _values(),
            "\n## Flags of the server\n\nThey have no keyword.\n\n",
            _table("flag", SERVER_OPTIONS, _as_flag),
            "\n## Flags of quire bench\n\n",
            _table("flag", BENCH_OPTIONS, _as_flag),
            "\n## Parameters of requests\n\n",
            *_parameters(),
            "## Environment variables\n\n",
            "quire's own are in [configuration.md](configuration.md#environment-variables).\n\n",
            _table("variable", ENVIRONMENT, _quoted),
            _imports(),
            _members(),
        )
    )


def _parameters() -> Iterator[str]:
    for kind, table in PARAMETERS.items():
        if table:
            yield f"Keywords of `{kind}`:\n\n{_table('keyword', table, _quoted)}\n"


def _table(title: str, table: Table, spelled: Callable[[str], str]) -> str:
    """Return a table of rows; names in succession with the same handling share one."""
    handled = ((_handling(row, spelled), _spelled_all(row, spelled)) for row in table.values())
    groups = itertools.groupby(handled, key=lambda one: one[0])
    rows = (f"| {', '.join(name for _, name in group)} | {handling} |\n" for handling, group in groups)
    return _HEAD.format(title) + "".join(rows)


def _as_flag(name: str) -> str:
    return f"`{flag_of(name)}`"


def _quoted(name: str) -> str:
    return f"`{name}`"


def _spelled_all(row: NameRow, spelled: Callable[[str], str]) -> str:
    return ", ".join((spelled(row.name), *map(_quoted, row.short)))


def _handling(row: NameRow, spelled: Callable[[str], str]) -> str:
    if row.fate is not Fate.RENAMED:
        return f"{row.fate.value} | {row.why}{_harmless(row)}"
    if row.to:
        return f"{spelled(row.to)} | {row.why}".rstrip()
    values = (
        f"`{value}`: " + (", ".join(f"{spelled(key)} {to}" for key, to in options.items()) or "nothing")
        for value, options in row.values.items()
    )
    return f"by value | {'; '.join(values)}"


def _harmless(row: NameRow) -> str:
    shown = [
        f"`{value}`"
        for value in row.harmless
        if isinstance(value, str | int) and value not in ("", "{}", False)
    ]
    return f"; accepted: {', '.join(shown)}" if shown else ""


def _values() -> str:
    rows = (
        f"| `{flag_of(row.option)} {row.value}` | {f'`{row.to}`' if row.to else 'not supported'} | {row.why} |\n"
        for row in OPTION_VALUES.values()
    )
    lines = (row.replace("|  |", "| |") for row in rows)
    return "".join(("\n## Values of options\n\n", _HEAD.format("value"), *lines))


def _imports() -> str:
    found = (f"| `{module}` | {_names(names)} |\n" for module, names in PRESENT.items())
    missing = (
        (module if name == ALL else f"{module}.{name}", why)
        for module, names in ABSENT.items()
        for name, why in names.items()
    )
    return "".join(
        (
            "\n## Imports\n\nThese paths of vLLM, with `quire` for `vllm`, have these names:\n\n",
            "| module | names |\n|---|---|\n",
            *found,
            "\nThese have not; the import is an error that says:\n\n| path | what to do |\n|---|---|\n",
            *_rows(missing),
        )
    )


def _names(names: Mapping[str, str]) -> str:
    return ", ".join(
        f"`{name}`" if place.endswith(f":{name}") else f"`{name}` (`{place.replace(':', '.')}`)"
        for name, place in names.items()
    )


def _members() -> str:
    named = ((f"{kind}.{name}", why) for kind, members in MEMBERS.items() for name, why in members.items())
    text = "\n## Methods\n\nThese do not exist; the error says:\n\n| member | what to do |\n|---|---|\n"
    return text + "".join(_rows(named))


def _rows(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return rows of names and sentences; names in succession with one sentence share a row."""
    for why, group in itertools.groupby(named, key=lambda one: one[1]):
        yield f"| {', '.join(_quoted(name) for name, _ in group)} | {why} |\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(vllm_page(), encoding="utf-8")
