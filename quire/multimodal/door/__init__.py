# SPDX-License-Identifier: Apache-2.0
"""Media of requests: from bytes, URLs and arrays to files for the worker and placeholders in the prompt."""
