# SPDX-License-Identifier: Apache-2.0
"""quire beside the other engines that run on a CPU: same checkpoint, same cases, taken in turn.

Invariant: this package imports the standard library only; whatever an engine needs is imported by its worker, in the
engine's own environment.
"""
