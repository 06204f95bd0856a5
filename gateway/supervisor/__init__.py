"""What runs inside the sandbox: the parent of the kernel process and its one ZMQ peer.

Standard library and pyzmq only, since the image copies this package as it is and every language's image carries it. It trusts
neither the kernel nor the network; the gateway in turn trusts nothing that this package sends. Only `frames` is shared.
"""
