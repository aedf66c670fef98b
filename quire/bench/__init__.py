# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: offline throughput and latency, and a load generator for servers; metric names are vLLM's."""
