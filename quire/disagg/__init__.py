# SPDX-License-Identifier: Apache-2.0
"""Proxy in front of prefill engines and decode engines (see kv_store.md)."""
