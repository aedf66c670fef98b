# SPDX-License-Identifier: Apache-2.0
"""vLLM's names: options, sampling parameters, variables, modules and methods, and the handling of each.

Invariant: torch-free, and imports nothing of quire but `quire.errors`, except in `page` and `argument_parser`, which no
module imports at start-up. One table per kind of name; `page` prints all of them.
"""
