# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of every request, outermost first: metrics, error boundary, header limit, HEAD, CORS, auth, quota,
availability, in-flight tracking, body encoding, body limit.

None of them buffers a body; all decide from the raw scope.
"""
