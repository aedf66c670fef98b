# SPDX-License-Identifier: Apache-2.0
"""Formats of tool calls and reasoning as data, and the scanner that reads them.

A format describes the markers around calls and how a call is written (`tools`), or the markers around reasoning
(`reasoning`). `answer.AnswerParser` reads any of them incrementally. A new format is a row in a table.
"""
