# SPDX-License-Identifier: Apache-2.0
"""Speech to text with Whisper: sounds, windows, requests to the engine, transcripts and their formats."""
