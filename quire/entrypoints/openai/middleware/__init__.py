"""What every request passes, outermost first: metrics, boundary, header limit, HEAD, CORS, auth, quota, availability,
body encoding, body limit.

Plain ASGI callables: none of them buffers a body, and all decide from the raw scope.
"""
