"""The HTTP between agents and operator: a small part of HTTP/1.1, authenticated on both sides (see
`auth`).

It is shared because both sides must agree on how much is read before a peer is authenticated.
"""
