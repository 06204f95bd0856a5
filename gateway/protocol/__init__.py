"""Pure data and pure functions about Jupyter messages and our events: no I/O, no clock, no other room."""
