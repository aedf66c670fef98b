# SPDX-License-Identifier: Apache-2.0
"""Batch jobs: many requests of a file, answered in this process, resumable after any end."""
