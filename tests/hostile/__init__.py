"""Cells as attackers: what code in a kernel tries against its sandbox, its neighbours, the gateway and the host."""
