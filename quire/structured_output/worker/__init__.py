# SPDX-License-Identifier: Apache-2.0
"""Grammars on the worker: token masks while sampling."""
