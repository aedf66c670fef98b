# SPDX-License-Identifier: Apache-2.0
"""Hooks for training loops: new weights while serving, and calls of the workers (docs/training.md).

Invariant: an update is a bracket, and it is used in all workers or in none.
"""
