"""What every request passes, outermost first: metrics, boundary, HEAD, CORS, auth, availability, body encoding, limit.

Plain ASGI callables: none of them buffers a body, and all decide from the raw scope.
"""
