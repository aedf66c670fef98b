"""How models write tool calls and reasoning: formats as data, and the one scanner that reads them.

A format says which markers stand around calls and how a call is written (`tools`), or which stand around reasoning
(`reasoning`); `answer.AnswerParser` reads any of them from text that arrives in pieces. A new one is a row in a table.
"""
