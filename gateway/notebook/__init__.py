"""Notebooks run through a gateway: read, parametrised, executed in one kernel, written, exported.

Built on the client alone: what happens here can be done by anybody with a URL and a token.
"""
