# SPDX-License-Identifier: Apache-2.0
"""Structured output: constraints on a request's text, and the grammars that enforce them.

Invariant: nothing here imports torch, the engine or the scheduler. The front end checks a constraint (`normalize`,
then `Checker`); the worker compiles it (`GrammarStore`) and asks a `Matcher` for the allowed tokens.
"""
