"""Structured output: what a request may ask its text to be, and the grammars that see to it.

Invariant: nothing here imports torch, the engine or the scheduler. The front end checks a constraint (`settle`, then
`Checker`), the worker compiles it (`GrammarStore`) and asks a `Matcher` which tokens may come next.
"""
