"""Values and the machine: no I/O, no async, no vendor. Everything here can be tested without an event loop."""
