# SPDX-License-Identifier: Apache-2.0
"""Several API processes on one port in front of one engine."""
