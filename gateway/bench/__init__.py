"""Measurements that anyone can repeat: each against a baseline made in the same run, interleaved, on loopback, and bounded."""
