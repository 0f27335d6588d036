"""HTTP servers: bind an address, bound the connections, and check hosts, origins and tokens."""
