# SPDX-License-Identifier: Apache-2.0
"""Scheduling of requests onto steps; pure Python, never imports torch."""
