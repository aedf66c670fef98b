"""The published description of the HTTP interface: what every route takes, gives and refuses.

Invariant: schemas of replies are made from the structs that are sent, those of requests from the models that check
them, and the rest from the tables that the server itself works by; nothing is written down a second time.
"""
