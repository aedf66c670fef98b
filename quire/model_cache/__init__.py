# SPDX-License-Identifier: Apache-2.0
"""Models on this machine: those in Hugging Face's cache, their sizes, facts and removal."""
