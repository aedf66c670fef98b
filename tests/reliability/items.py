# SPDX-License-Identifier: Apache-2.0
"""The promises of docs/reliability.md: what happens to whom, and where else it went wrong.

A test says which of them it holds: `@pytest.mark.item(8)`. `python -m tests.reliability.table` writes the page.
"""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """Promise about an event at a server, and records of where it failed elsewhere (#n: vllm-project/vllm)."""

    promise: str
    elsewhere: str


INPUT = {
    1: Item("an empty prompt, list or conversation: 400", "CVE-2024-8768"),
    2: Item("token ids that are none (-1, the vocabulary's size, 2^63, 1.5, true) wherever ids may stand: 400",
            "CVE-2026-93592, GHSA-v5gm-qgmv-gc6c"),
    3: Item("NaN, infinities, denormals in any number: 400, or a defined effect and no NaN in the reply",
            "CVE-2026-54235"),
    4: Item("huge `n`, `best_of`, lists of prompts, and their products: 400 before anything is copied",
            "CVE-2026-34756, CVE-2026-73559"),
    5: Item("`max_tokens` of 0, below, or beyond the context: 400 or told in the reply, never cut silently",
            "CVE-2026-93436, ollama#8099"),
    6: Item("logprobs are bounded; those of a prompt are the same with a warm prefix cache",
            "GHSA-rhcx-5729-88vg, #5344"),
    7: Item("`min_tokens` with stop ids works, and contradictions are 400", "GHSA-v5gm-qgmv-gc6c"),
    8: Item("a body a byte over the limit: 413; one without end is not read on; compressed ones count unpacked",
            "CVE-2026-55646"),
    9: Item("heads that are too large or ambiguous: 431, 400; no spelling of host or path opens a route",
            "CVE-2025-48956, CVE-2026-48746"),
    10: Item("JSON that is deep, repeated, not UTF-8, or of a million values: 400 at once", ""),
    11: Item("fields without effect are named in the reply; those that would change the answer are 400", "#10463"),
    12: Item("a bad or hostile JSON schema: 400 within the time for compiling", "CVE-2025-48942, CVE-2025-57809"),
    13: Item("a hostile regular expression: 400 or compiled in time, and other streams go on", "CVE-2026-55574"),
    14: Item("thousands of schemas: their cache has a size", "GHSA-hf3c-wxg2-49q9, CVE-2025-29770"),
    15: Item("a grammar without a way on ends its request alone", "#52852, GHSA-85xf-c7hm-whqw"),
    16: Item("templates come from the operator, run in a sandbox, and are stopped when they take too long",
             "CVE-2025-61620, CVE-2025-62426, CVE-2026-5760"),
    17: Item("special tokens that a user writes are text", "CVE-2026-44222"),
    18: Item("any text of a model goes through the tool parser, cut anywhere, with the same calls",
             "CVE-2025-48887, CVE-2025-9141, #10395"),
    19: Item("no address in a request is ever opened", "CVE-2026-24779, CVE-2026-25960"),
    20: Item("names of models are looked up, and are no paths", "CVE-2026-7302"),
    21: Item("a client's request id is a label: two may be equal, and it opens nothing", "#15041, GHSA-2phq-3phc-84px"),
    22: Item("what one salt, or one key, has cached no other finds, on any route that generates",
             "CVE-2026-105752, GHSA-wpww-v874-ph2p"),
    23: Item("every route but the probes asks for the key, which is compared in constant time", "CVE-2025-59425"),
    24: Item("an error reply tells nothing of the server: no path, address, class or traceback",
             "CVE-2026-73555, CVE-2026-22778"),
    25: Item("strange methods and paths do not grow the metrics", "GHSA-5fj9-pfhr-6j48"),
    26: Item("a damaged or hostile model directory: a sentence that names the file, and nothing of it is run",
             "CVE-2026-4372, CVE-2026-33298"),
    27: Item("the same refusals under `python -O`", "CVE-2026-41523"),
}  # fmt: skip
LOAD = {
    28: Item("of more requests than the queue takes, what is being tokenized included, exactly so many are served, the "
             "rest 503 at once", "#58192"),
    29: Item("the queue is bounded by tokens, too", "#49445"),
    30: Item("a tenant that floods meets its own limit (429), and the next has its first token in < 3x the steps",
             "#31909, llm-d#1182"),
    31: Item("low priority waits no longer than its age", ""),
    32: Item("a client that leaves, at whatever moment, takes its request along", "#54947, #29906, #46283"),
    33: Item("an abort that comes twice, late or for nobody is no error, and a request ends once", "#26400"),
    34: Item("who reads slowly is waited for a bounded time, and costs nobody else", ""),
    35: Item("half-sent heads and too many connections are cut or told, and real requests pass", ""),
    36: Item("a deadline ends a request wherever it is: 504, or what it has by then", ""),
    37: Item("a stream ends with one finish reason per choice, the usage if asked, and [DONE]", "#52852"),
    38: Item("a stream says what the whole reply says: text, logprobs, tool calls, usage", "#9693"),
    39: Item("usage and metrics agree, and every reply has its times", "#40076, #44475"),
    40: Item("a cache too small for all serves all, with the same tokens", "OVMS#4428, #45388, vllm-metal#479"),
    41: Item("what can never fit is refused with the numbers", ""),
    42: Item("tokens and logprobs are the same alone, in any batch, cold, warm and preempted", "#40896, #51187"),
}  # fmt: skip
FAULTS = {
    43: Item("the core is killed: a pause on the same port; the fourth time in ten minutes ends the server",
             "#39863, #27866"),
    44: Item("the core stands still: 503 on `/health` and `/livez`, deadlines are kept; it goes on or is replaced, as "
             "one that spins", "#36451"),
    45: Item("a long prefill is no hang", "sglang#22511"),
    46: Item("the server is killed: its core is gone in seconds, and nothing is left", "vLLM's test_parent_death"),
    47: Item("a step fails, or gives NaN: a pause, or the end of that request alone", "vLLM's evil_forward"),
    48: Item("SIGTERM: what was let in finishes, streams to the byte, new requests get 503, exit code 0; twice: 503, "
             "or an error event", "#24885"),
    49: Item("a start that cannot succeed is a sentence and an exit code, and leaves nothing", "#17618"),
    50: Item("foreign code that hangs or dies costs its request, and an API process its connections", ""),
    51: Item("garbage on the internal sockets, of the core or of the server, costs a line in the log", "#44486"),
    52: Item("the cache is sized by what memory there is, new work refused when it is short, and a step that gets none "
             "costs a pause", "#9011"),
    53: Item("clocks that jump, full disks, closed streams, no descriptors: it keeps serving", ""),
    54: Item("it sleeps and wakes under load, in one process or several; models are not swapped",
             "#24849, #28443, CVE-2026-43631"),
}  # fmt: skip
WHOLE = {
    55: Item("state machines over pool, prefix cache and scheduler, against models of them", "users' ref_cnt asserts"),
    56: Item("a state machine over the whole engine: any request is what it is alone", ""),
    57: Item("random requests to every route of the published schema: never a 5xx, never a hang",
             "vLLM's fuzzing is positive only"),
    58: Item("fuzzers: JSON, schemas, text, tool calls, safetensors, frames, kernels", "CVE-2026-33298, #44486"),
    59: Item("a soak: mixed traffic, disconnects, bad input, a killed core; nothing leaks", "#52089, #22736"),
    60: Item("lint: no pickle, eval, shell, remote code or fetching; no assert about what a request says",
             "CVE-2024-9052, CVE-2026-41523"),
}  # fmt: skip
SECTIONS = {
    "What a request may hold": INPUT,
    "Load, cancellation, the end of a stream": LOAD,
    "Faults": FAULTS,
    "The whole": WHOLE,
}
ITEMS = {number: item for section in SECTIONS.values() for number, item in section.items()}
