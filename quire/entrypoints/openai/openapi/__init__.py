# SPDX-License-Identifier: Apache-2.0
"""OpenAPI description of the HTTP interface: requests, replies and errors of every route.

Invariant: reply schemas are generated from the structs that are sent, request schemas from the models that check them,
and the rest from the server's own tables; nothing is written twice.
"""
