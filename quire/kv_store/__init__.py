# SPDX-License-Identifier: Apache-2.0
"""Prefix cache that outlives the process: rows of the KV cache on disk or with a peer."""
